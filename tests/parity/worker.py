"""One rank of a worker group: imports DeepSpeed once, then runs what comes down its socket.

Started by `workers.WorkerGroup` as `python -m tests.parity.worker --socket FD`. Everything
printed goes to the rank's log file; only answers go back through the socket.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

CAP_DAC_OVERRIDE = 1
PR_SET_KEEPCAPS = 8
LINUX_CAPABILITY_VERSION_3 = 0x20080522


Run = Callable[..., dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--memlock-bytes", type=int)
    arguments = parser.parse_args()
    handle_signals()

    import deepspeed

    import memascend  # noqa: F401  what the torch.backends entry point does in an installed copy

    from . import training

    prepare_deepspeed()
    deepspeed.init_distributed(dist_backend="gloo")
    if arguments.memlock_bytes is not None:
        deepspeed.ops.op_builder.CPUAdamBuilder().load()
        become_unprivileged(memlock_bytes=arguments.memlock_bytes)
    serve(arguments.socket, training.run_case)


def handle_signals() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Unwinds, so that torch removes its lock on an op that is being loaded.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def prepare_deepspeed() -> None:
    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import nvtx

    from tests.support import products

    torch.set_num_threads(1)
    nvtx.enable_nvtx = False  # marks for a profiler around each of its functions
    # fp16 is emulated on most CPUs; DeepSpeed then refuses it although it works.
    type(get_accelerator()).is_fp16_supported = lambda self: True
    products.use_fp32()


def serve(socket: int, run: Run) -> None:
    """Answer one case after the other until the socket is closed."""
    from .cases import Case

    connection = Connection(socket)
    connection.send("ready")
    is_frozen = False  # gc.get_freeze_count() walks through all that is
    while True:
        try:
            fields, config, options = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer = {"facts": run(Case(**fields), config, **options)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        connection.send(answer)
        # What the first case has imported stays: no later one has to look through all of it.
        if not is_frozen:
            gc.freeze()
            is_frozen = True


def become_unprivileged(*, memlock_bytes: int) -> None:
    """Limit page-locked memory as an ordinary user's is limited.

    As root, become user 65534 and give up every capability, CAP_IPC_LOCK above all, but the right
    to read and write files: the interpreter and pytest's directories may be root's alone.
    """
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock_bytes, memlock_bytes))
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_KEEPCAPS)")
    os.setgid(65534)
    os.setuid(65534)
    header = (ctypes.c_uint32 * 2)(LINUX_CAPABILITY_VERSION_3, 0)
    kept = 1 << CAP_DAC_OVERRIDE
    # Two halves of (effective, permitted, inheritable).
    sets = (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0)
    if libc.capset(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capset(CAP_DAC_OVERRIDE)")


if __name__ == "__main__":
    main()
