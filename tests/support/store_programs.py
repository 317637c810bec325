"""Starts short programs that have a store of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRELUDE = """
import os, signal, sys
from pathlib import Path
from tests.support.nvme_memory import open_store, read, write
from memascend.errors import *
directory = Path(sys.argv[1])
"""


def start(
    directory: Path, script: str, *more: str, environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """Run a script in another process, with `directory` and all of `nvme_memory` at hand."""
    search_path = {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(script), str(directory), *more],
        stdin=subprocess.PIPE,
        env=os.environ | search_path | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
