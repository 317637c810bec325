"""Hints to the kernel about mapped pages."""

from __future__ import annotations

import ctypes

_MADV_PAGEOUT = 21  # since Linux 5.4; not in Python's mmap


def page_out(begin: int, nbytes: int) -> None:
    """Ask the kernel to move mapped pages, from an address on, out of memory; it may refuse."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes), _MADV_PAGEOUT)
