"""Starts a program once for each rank of one machine: `python ranks.py COUNT PROGRAM ARGUMENTS`.

As torchrun does, but for the imports: large libraries that the program imports are imported here,
once, and each rank is a fork. DeepSpeed alone takes three seconds of a core. Forks have the same
hashes of strings and the same state of `random`, so sets iterate alike in all of them: ranks that
differ in this are in parity's own processes, and in tests/integration/test_launchers.py and
test_nodes.py, which have torchrun itself, and others.
"""

from __future__ import annotations

import ast
import importlib
import os
import runpy
import signal
import sys
import time
from pathlib import Path

#: How the command above begins.
RANKS = str(Path(__file__).resolve())
#: What a rank that is told to end has until it is killed, as of torchrun.
GRACE_S = 30.0
POLL_S = 0.02
#: They start no thread when they are imported, and do not ask then which rank they serve.
LARGE = ("torch", "deepspeed", "transformers", "accelerate")


def environment_of(rank: int, count: int, port: int) -> dict[str, str]:
    """Return what torchrun tells a rank, and DeepSpeed asks for."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def import_what_is_large(program: str) -> None:
    """Import the large libraries that a program begins with, in its order."""
    sys.path[0] = str(Path(program).resolve().parent)  # as the program has it
    for node in ast.parse(Path(program).read_text(encoding="utf-8")).body:
        for alias in node.names if isinstance(node, ast.Import) else ():
            if alias.name.partition(".")[0] in LARGE:
                importlib.import_module(alias.name)


class Rank:
    """A child of this process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the status that it ended with, that of a signal below 0; None: it has not."""
        if self._status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self._pid, number)


def end(ranks: list[Rank]) -> None:
    """Tell all ranks to end, and kill those that do not."""
    for rank in ranks:
        rank.send(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while not have_ended(ranks) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for rank in ranks:
        rank.send(signal.SIGKILL)
    while not have_ended(ranks):
        time.sleep(POLL_S)


def have_ended(ranks: list[Rank]) -> bool:
    return all(rank.poll() is not None for rank in ranks)


def watch(ranks: list[Rank]) -> int:
    """Return 0 when every rank has, 1 as soon as one fails."""
    while True:
        found = [rank.poll() for rank in ranks]
        failed = {rank: status for rank, status in enumerate(found) if status}
        if failed:
            print(f"ended with a status: {failed}", flush=True)
            return 1
        if None not in found:
            return 0
        time.sleep(POLL_S)


def run(rank: int, count: int, port: int, command: list[str]) -> None:
    """Be a rank: run the program."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ |= environment_of(rank, count, port)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


def main() -> int:
    """Start all ranks, and end them when one fails; in a rank, run the program."""
    from ports import free_port  # beside this file

    count, *command = sys.argv[1:]
    os.environ["OMP_NUM_THREADS"] = "1"  # which torch looks for when it is imported
    # A line at once, and whole beside those of other ranks.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    port = free_port()
    if os.environ.get("DS_ACCELERATOR") == "cpu":  # a search for devices would spoil the forks
        import_what_is_large(command[0])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    ranks: list[Rank] = []
    try:
        for rank in range(int(count)):
            pid = os.fork()
            if pid == 0:
                ranks.clear()  # they are its parent's
                run(rank, int(count), port, command)
                return 0
            ranks.append(Rank(pid))
        return watch(ranks)
    finally:
        end(ranks)


if __name__ == "__main__":
    sys.exit(main())
