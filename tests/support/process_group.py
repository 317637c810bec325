"""How a program ends that has used gloo."""

from __future__ import annotations

import time

from deepspeed import comm

#: gloo's threads take the GIL to free the tensors of the last collective; a Python that is
#: finalizing by then kills them, and torch aborts.
LAST_TENSORS_S = 0.5


def leave() -> None:
    """Give the process group up; on return Python may end."""
    comm.destroy_process_group()
    time.sleep(LAST_TENSORS_S)
