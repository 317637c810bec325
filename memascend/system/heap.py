"""The heap: finds the allocator behind malloc, and makes glibc's give freed memory back.

glibc keeps freed memory for the next allocation. If tensors of many sizes are allocated and freed,
as layers do if the device is the CPU, it keeps pieces of all of them. An allocation with a mapping
of its own goes back to the system when it is freed, so glibc is told to map from a smaller size on.
Memory that is free in the heap at that time is still used first. The settings belong to the
process, cannot be read back, and stay until it ends. A `malloc_trim` between phases would find
almost nothing: large memory has gone back by then, and small memory is in use.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memascend.base.units import MIB, format_nbytes
from memascend.system.mounts import PROC, read_line

# Constants of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4

_GLIBC = "glibc"
#: Default maximum of mappings of a process (vm.max_map_count); glibc's own limit is the same.
_MAP_COUNT_MAX = 65530
#: The heap may use one of so many mappings. Beyond that glibc allocates as before.
_HEAP_SHARE = 4
_PROBE_BYTES = MIB
_PROBE_TRIES = 3


@dataclass(frozen=True, slots=True)
class Heap:
    """The allocator behind malloc in this process, and its settings."""

    allocator: str  # name and version, such as "glibc 2.36"; of another allocator its file's name
    why_left: str = ""  # reason why it is not set; empty if glibc's may be set
    mapped_bytes_min: int | None = None  # smallest allocation with its own mapping; None: not set

    @property
    def is_glibc(self) -> bool:
        """True if malloc is glibc's."""
        return self.allocator.startswith(_GLIBC)

    def describe(self) -> str:
        """Return the allocator and its settings, for the log."""
        if self.mapped_bytes_min is not None:
            nbytes = format_nbytes(self.mapped_bytes_min)
            return f"heap of {self.allocator}: freed memory goes back at once from {nbytes} on"
        return f"heap of {self.allocator}" + (self.why_left and f", left alone: {self.why_left}")


def examine_heap(settings: Sequence[str] = ()) -> Heap:
    """Return the allocator behind malloc, and the reason why it is not set, if there is one.

    `settings` are names of environment variables with which the user has set malloc.
    """
    libc = _glibc()
    if libc is None or not _is_serving(libc):
        return Heap(_file_of_malloc(libc), "it is not glibc's")
    version = os.confstr("CS_GNU_LIBC_VERSION") or _GLIBC
    return Heap(version, f"set by {', '.join(settings)}" if settings else "")


def give_back_freed(
    *, mapped_bytes_min: int, settings: Sequence[str] = (), proc: Path = PROC
) -> Heap:
    """Make glibc map allocations from a size on; skip other allocators and the user's settings."""
    heap = examine_heap(settings)
    libc = _glibc()
    if heap.why_left or libc is None:
        return heap
    values = {
        # The only one that glibc may refuse, so it is first: then nothing is set.
        _M_MMAP_THRESHOLD: mapped_bytes_min,
        # Each mapping counts against the process's maximum, unless the kernel merges it with its
        # neighbour. At the maximum no thread can map memory, nor unmap a part of a mapping.
        _M_MMAP_MAX: _map_count_max(proc) // _HEAP_SHARE,
        # The end of the heap. Setting any of the three stops glibc from adapting its thresholds.
        _M_TRIM_THRESHOLD: mapped_bytes_min,
    }
    if not all(libc.mallopt(setting, value) for setting, value in values.items()):
        return replace(heap, why_left=f"it refuses {mapped_bytes_min} bytes")
    return replace(heap, mapped_bytes_min=mapped_bytes_min)


_ACCOUNT = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Account(ctypes.Structure):
    """The fields of glibc's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in _ACCOUNT]


class _OldAccount(ctypes.Structure):
    """The same as 32-bit numbers, before glibc 2.33."""

    _fields_ = [(name, ctypes.c_uint) for name in _ACCOUNT]


def _glibc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return None
    return libc


def _is_serving(libc: ctypes.CDLL) -> bool:
    """Allocate memory, and check that glibc's counters grow.

    The address of the symbol malloc is no proof: in a program at a fixed address, as some builds of
    Python are, it appears to be the program's own.
    """
    process = ctypes.CDLL(None)
    process.malloc.restype, process.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    process.free.argtypes = [ctypes.c_void_p]
    for _ in range(_PROBE_TRIES):  # again, since other threads may free memory meanwhile
        before = _in_use(libc)
        address = process.malloc(_PROBE_BYTES)
        grown = (_in_use(libc) - before) % (1 << 32)
        process.free(address)
        if _PROBE_BYTES // 2 <= grown < 1 << 31:
            return True
    return False


def _in_use(libc: ctypes.CDLL) -> int:
    kind = _Account if hasattr(libc, "mallinfo2") else _OldAccount
    ask = libc.mallinfo2 if kind is _Account else libc.mallinfo
    ask.restype = kind
    account = ask()
    return int(account.uordblks) + int(account.hblkhd)


class _Symbol(ctypes.Structure):
    """The `Dl_info` of dladdr."""

    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


class _Loaded(ctypes.Structure):
    """The first fields of `dl_phdr_info`."""

    _fields_ = [("base", ctypes.c_void_p), ("file", ctypes.c_char_p)]


_NOTE_LOADED = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(_Loaded), ctypes.c_size_t, ctypes.c_void_p
)


def _file_of_malloc(libc: ctypes.CDLL | None) -> str:
    """Return the file name of the first library in the loader's order that defines malloc.

    Without such a library it is the program's own. The address of malloc alone is no proof: in a
    program at a fixed address it appears to be the program's.
    """
    glibc = None if libc is None else _file_defining_malloc(libc)
    for file in _loaded_files():
        if file == glibc:
            break  # a library before glibc replaces its malloc, none behind it does
        with suppress(OSError, AttributeError):  # the vDSO, or a library without malloc
            library = ctypes.CDLL(os.fsdecode(file), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            if _file_defining_malloc(library) == file:
                return os.path.basename(os.fsdecode(file))
    own = _file_defining_malloc(ctypes.CDLL(None))
    return os.path.basename(os.fsdecode(own)) or "an unknown library"


def _loaded_files() -> list[bytes]:
    """Return the libraries of this process, in the loader's order."""
    files: list[bytes] = []

    def note(loaded: Any, size: int, data: object) -> int:
        files.append(loaded.contents.file or b"")
        return 0

    ctypes.CDLL(None).dl_iterate_phdr(_NOTE_LOADED(note), None)
    return [file for file in files if file]  # the program itself has no name


def _file_defining_malloc(library: ctypes.CDLL) -> bytes:
    symbol = _Symbol()
    address = ctypes.cast(library.malloc, ctypes.c_void_p)
    found = ctypes.CDLL(None).dladdr(address, ctypes.byref(symbol))
    return symbol.file or b"" if found else b""


def _map_count_max(proc: Path) -> int:
    text = read_line(proc / "sys/vm/max_map_count")
    return min(int(text), _MAP_COUNT_MAX) if text.isdigit() else _MAP_COUNT_MAX
