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

# A seccomp filter, as container runtimes install one. A row: code, jump if true, if false, value.
FILTER = """
import ctypes, errno, struct
def install(rows):
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
    class Program(ctypes.Structure):
        _fields_ = [("count", ctypes.c_ushort), ("code", ctypes.c_void_p)]
    program = Program(len(rows), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0, ctypes.get_errno()  # PR_SET_SECCOMP
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, FAIL_WITH = 0x7FFF0000, 0x00050000
NUMBER, THIRD_ARGUMENT = 0, 32  # where they are in struct seccomp_data
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
