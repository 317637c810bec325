"""Every rank is told who it is; none outlives one that fails, nor who started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.support.ranks import RANKS

TELLS = "import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1])"
WAITS = """
import os, sys, time
from pathlib import Path

folder, failing = Path(sys.argv[1]), sys.argv[2]
(folder / os.environ["RANK"]).write_text(str(os.getpid()))
while len(list(folder.iterdir())) < 3:
    time.sleep(0.01)
if os.environ["RANK"] == failing:
    sys.exit(3)
time.sleep(600)
"""


def started(program: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    path = folder / "program.py"
    path.write_text(program)
    command = [sys.executable, RANKS, "2", str(path), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def pids(folder: Path) -> list[int]:
    """Return those of both ranks, as soon as they are known."""
    files = [folder / "0", folder / "1"]
    while not all(file.exists() and file.read_text() for file in files):
        time.sleep(0.01)
    return [int(file.read_text()) for file in files]


def test_every_rank_runs_the_program(tmp_path: Path) -> None:
    process = started(TELLS, tmp_path, "argument")
    output, _ = process.communicate()
    assert sorted(output.splitlines()) == ["0 2 argument", "1 2 argument"]
    assert process.returncode == 0


def test_where_one_fails_the_other_is_ended(tmp_path: Path) -> None:
    process = started(WAITS, tmp_path, str(tmp_path), "1")
    ranks = pids(tmp_path)
    output, _ = process.communicate()
    assert (process.returncode, output) == (1, "ended with a status: {1: 3}\n")
    assert not any(map(psutil.pid_exists, ranks))


def test_who_ends_it_ends_all(tmp_path: Path) -> None:
    process = started(WAITS, tmp_path, str(tmp_path), "none")
    ranks = pids(tmp_path)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM
    assert not any(map(psutil.pid_exists, ranks))
