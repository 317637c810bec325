"""Starts a test file as a program of its own, for what must be measured in a fresh DeepSpeed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_port
from tests.support.ranks import RANKS

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 400.0  # the first run on a machine compiles DeepSpeed's ops
EXIT_SKIPPED = 77

RunProgram = Callable[..., Any]


@pytest.fixture(scope="session")
def run_program() -> RunProgram:
    """Runs `python FILE ARGUMENTS...` as CPU ranks; the last line of output is JSON."""

    def run(program: str, *arguments: str, ranks: int = 1, timeout_s: float = TIMEOUT_S) -> Any:
        programs = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        defaults = {
            "DS_ACCELERATOR": "cpu",
            "TORCH_EXTENSIONS_DIR": str(REPOSITORY / ".venv" / "torch_extensions"),
        }
        environment = defaults | dict(os.environ)
        alone = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        environment |= (alone if ranks == 1 else {}) | {
            "PATH": os.pathsep.join(programs),
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), environment.get("PYTHONPATH", "")]),
        }
        done = subprocess.run(
            [sys.executable, *([RANKS, str(ranks)] if ranks > 1 else []), program, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode == EXIT_SKIPPED:
            pytest.skip(done.stdout.splitlines()[-1])
        assert done.returncode == 0, f"{program} failed:\n{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout.splitlines()[-1])

    return run
