"""Files that are read through mappings: their pages come no earlier, and go no later than needed.

Whoever reads a checkpoint through a mapping keeps every page it has touched until the mapping goes.
Here the pages go earlier. Only hints are given to the kernel, so nothing is ever lost: a page that
is read again comes back from the drive, and one that was written to stays. Linux only; any thread.
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

#: What a file that is something else may lead to.
_NO_HEADER = (ValueError, TypeError, LookupError, AttributeError, OverflowError)


@dataclass(frozen=True, slots=True)
class Mapping:
    """One line of /proc/self/maps that has a file: addresses from `begin` to before `end`."""

    begin: int
    end: int
    inode: int
    path: str


class MappedFiles:
    """The mapped files below some addresses, for as long as the `with` block lasts.

    On leaving it their pages are let go once more.
    """

    def __init__(self, addresses: Iterable[int], maps: Path = Path("/proc/self/maps")) -> None:
        """Look at what is mapped now.

        Args:
            addresses: Anywhere in the mappings that are meant; those of other memory are ignored.
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
        """Let all pages go, of the mappings and of the page cache.

        What the kernel refuses stays: pages that other processes have mapped too, and all of files
        that this user neither owns nor may write.
        """
        for mapping in self.mappings:
            page_out(mapping.begin, mapping.end - mapping.begin)
        for descriptor in self._descriptors:
            # What was read ahead and never touched. It may be read again, but memory stays bounded.
            with contextlib.suppress(OSError):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def read_starts(path: str, *, tensors: bool) -> None:
    """Read the header of a safetensors file and nothing ahead of it.

    The library touches the header when it maps a file, and the first byte of each tensor when it is
    asked for them. A page that is not in the cache then brings as much as the kernel reads ahead,
    several mebibytes on some machines: with many tensors the whole file. What is no such file is
    left to the library.

    Args:
        path: Of the file.
        tensors: Whether the first byte of each tensor is read too.
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
    """Return the mappings with a file by address; none where they cannot be read."""
    found = []
    with contextlib.suppress(OSError):
        for line in maps.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            words = line.split(maxsplit=5)
            if len(words) == 6 and words[4] != "0" and words[5].startswith("/"):
                begin, _, end = words[0].partition("-")
                found.append(Mapping(int(begin, 16), int(end, 16), int(words[4]), words[5]))
    return found


def _below(addresses: list[int], mappings: list[Mapping]) -> list[Mapping]:
    """Return the mappings that hold one of the sorted addresses and whose file is on a drive."""
    found = []
    for mapping in mappings:
        place = bisect.bisect_left(addresses, mapping.begin)
        is_meant = place < len(addresses) and addresses[place] < mapping.end
        if is_meant and not _is_in_memory(mapping.path):
            found.append(mapping)
    return found


def _is_in_memory(path: str) -> bool:
    """Tell if pages are, or may be, the only copy, which paging out would write to swap."""
    try:
        return filesystem_of(path) in IN_MEMORY
    except OSError:
        return True


def _opened(path: str, inode: int) -> int | None:
    """Return a descriptor of a mapped file; None where its name now means another one."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    if os.fstat(descriptor).st_ino == inode:
        return descriptor
    os.close(descriptor)
    return None
