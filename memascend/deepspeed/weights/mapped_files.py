"""Limits the page memory of mapped files: less is read ahead, and pages are dropped early.

A program that reads a checkpoint through a mapping keeps every page that it has touched until the
mapping ends. This module gives the kernel hints to drop them earlier. No data is lost: a page that
is read again comes back from the drive, and a modified page stays. Linux only; any thread.
"""

from __future__ import annotations

import bisect
import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memascend.base.json_text import parse_json
from memascend.plan.safetensors import HEADER_BYTES_MAX
from memascend.system.mounts import IN_MEMORY, filesystem_of
from memascend.system.pages import page_out

#: Errors of parsing a file that has no safetensors header.
_NO_HEADER = (ValueError, TypeError, LookupError, AttributeError, OverflowError)


@dataclass(frozen=True, slots=True)
class Mapping:
    """One line of /proc/self/maps that has a file: addresses from `begin` to before `end`."""

    begin: int
    end: int
    inode: int
    path: str


class MappedFiles:
    """The mapped files that contain some addresses, for a `with` block.

    On leaving it their pages are dropped once more.
    """

    def __init__(self, addresses: Iterable[int], maps: Path = Path("/proc/self/maps")) -> None:
        """Look up the current mappings.

        Args:
            addresses: Addresses anywhere in the mappings; those of other memory are ignored.
            maps: For tests.
        """
        self.mappings = _below(sorted(set(addresses)), _read_maps(maps))
        self._descriptors: list[int] = []

    def __enter__(self) -> MappedFiles:
        for path, inode in {(mapping.path, mapping.inode) for mapping in self.mappings}:
            descriptor = _opened(path, inode)
            if descriptor is not None:
                self._descriptors.append(descriptor)
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()
        while self._descriptors:
            os.close(self._descriptors.pop())

    def drop(self) -> None:
        """Drop all pages, of the mappings and of the page cache.

        The kernel keeps pages that other processes have mapped too, and all pages of files that
        this user neither owns nor may write.
        """
        for mapping in self.mappings:
            page_out(mapping.begin, mapping.end - mapping.begin)
        for descriptor in self._descriptors:
            # Pages that were read ahead and not touched. They may be read again, but memory stays
            # bounded.
            with contextlib.suppress(OSError):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def read_starts(path: str, *, tensors: bool) -> None:
    """Read the header of a safetensors file without read-ahead, so that its pages are cached.

    The safetensors library touches the header when it maps a file, and the first byte of each
    tensor when it returns them. For a page that is not cached the kernel reads ahead, several
    mebibytes on some machines: with many tensors the whole file. Other files are left alone.

    Args:
        path: The file.
        tensors: Also read the first byte of each tensor.
    """
    with contextlib.suppress(OSError, *_NO_HEADER):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            header_bytes = int.from_bytes(os.pread(descriptor, 8, 0), "little")
            if header_bytes > HEADER_BYTES_MAX:
                return
            header: Any = parse_json(os.pread(descriptor, header_bytes, 8))
            for name, entry in header.items() if tensors else ():
                if name != "__metadata__":
                    os.pread(descriptor, 1, 8 + header_bytes + int(entry["data_offsets"][0]))
        finally:
            os.close(descriptor)


def _read_maps(maps: Path) -> list[Mapping]:
    """Return the mappings of files, by address; empty if they cannot be read."""
    found = []
    with contextlib.suppress(OSError):
        for line in maps.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            words = line.split(maxsplit=5)
            if len(words) == 6 and words[4] != "0" and words[5].startswith("/"):
                begin, _, end = words[0].partition("-")
                found.append(Mapping(int(begin, 16), int(end, 16), int(words[4]), words[5]))
    return found


def _below(addresses: list[int], mappings: list[Mapping]) -> list[Mapping]:
    """Return the mappings that contain one of the sorted addresses and whose file is on a drive."""
    found = []
    for mapping in mappings:
        place = bisect.bisect_left(addresses, mapping.begin)
        is_meant = place < len(addresses) and addresses[place] < mapping.end
        if is_meant and not _is_in_memory(mapping.path):
            found.append(mapping)
    return found


def _is_in_memory(path: str) -> bool:
    """Return whether the pages may be the only copy, so that paging out would write to swap."""
    try:
        return filesystem_of(path) in IN_MEMORY
    except OSError:
        return True


def _opened(path: str, inode: int) -> int | None:
    """Return a descriptor of a mapped file; None if another file has its name now."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    if os.fstat(descriptor).st_ino == inode:
        return descriptor
    os.close(descriptor)
    return None
