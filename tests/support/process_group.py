"""How a program that has other ranks beside it prints, and how it ends."""

from __future__ import annotations

import sys
import time

from deepspeed import comm

#: gloo's threads take the GIL to free the tensors of the last collective; a Python that is
#: finalizing by then kills them, and torch aborts.
LAST_TENSORS_S = 0.5


def leave() -> None:
    """Give the process group up; on return Python may end."""
    comm.destroy_process_group()
    time.sleep(LAST_TENSORS_S)


def say(line: str) -> None:
    """Print a line in one piece: without a buffer, print writes its end apart."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
