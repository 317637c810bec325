"""Threads of our own: each runs what it is given in order, and is prepared once.

Threads begin with different duties: one whose calls reach a device makes that device its current
one, since CUDA would else make a context on device 0 of its own accord.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def new_thread(name: str, prepare: Callable[[], object]) -> ThreadPoolExecutor:
    """Return one thread that is prepared.

    An initializer of the executor would serve as well, but its error would break the executor and
    leave those who wait for work without an answer.

    Raises:
        RuntimeError: The system has no thread to give, or preparing it failed.
    """
    thread = ThreadPoolExecutor(1, name)
    thread.submit(prepare).result()
    return thread
