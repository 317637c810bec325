"""Starts a program once for each rank of one machine: `python ranks.py COUNT PROGRAM ARGUMENTS`.

As torchrun does, without importing torch, which takes more than a second of a core each time.
tests/integration/test_launchers.py and test_nodes.py have torchrun itself, and others.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

#: How the command above begins.
RANKS = str(Path(__file__).resolve())
#: What a rank that is told to end has until it is killed, as of torchrun.
GRACE_S = 30.0
POLL_S = 0.02


def environment_of(rank: int, count: int, port: int) -> dict[str, str]:
    """Return what torchrun tells a rank, and DeepSpeed asks for."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def start(count: int, command: list[str], port: int) -> list[subprocess.Popen[bytes]]:
    return [
        subprocess.Popen(
            [sys.executable, "-u", *command],
            env=os.environ | environment_of(rank, count, port),
            start_new_session=True,
        )
        for rank in range(count)
    ]


def end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Tell all ranks to end, and kill those that do not."""
    for rank in ranks:
        rank.terminate()
    deadline = time.monotonic() + GRACE_S
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for rank in ranks:
        rank.kill()
        rank.wait()


def main() -> int:
    """Return 0 when every rank has; the others are ended where one fails."""
    from ports import free_port  # beside this file

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    count, *command = sys.argv[1:]
    ranks = start(int(count), command, free_port())
    try:
        while True:
            found = [rank.poll() for rank in ranks]
            failed = {rank: status for rank, status in enumerate(found) if status}
            if failed:
                print(f"ended with a status: {failed}", flush=True)
                return 1
            if None not in found:
                return 0
            time.sleep(POLL_S)
    finally:
        end(ranks)


if __name__ == "__main__":
    sys.exit(main())
