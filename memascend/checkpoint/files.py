"""Files of a checkpoint, written and read piece by piece.

Knows torch and the file system; never DeepSpeed. Only one piece of a tensor is in memory at a time,
and its pages are dropped from the page cache after they were written or read.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch

from memascend.base.progress import Advance
from memascend.errors import CheckpointError, MemAscendError
from memascend.system.pages import page_out

#: About this many bytes of a file may be in the page cache before they are flushed or dropped.
FLUSH_BYTES = 64 << 20
#: Bytes per read if there is no staging slot.
PIECE_BYTES = 1 << 20


class FlushedFile:
    """A new file that is synced to the drive, and dropped from the page cache, while it grows."""

    def __init__(self, file: BinaryIO) -> None:
        """Take an open file; this object must be its only writer."""
        self._file = file
        self._unflushed_bytes = 0

    def write(self, piece: Any) -> int:
        """Append an object with a buffer; return its bytes, as files do."""
        view = memoryview(piece).cast("B")
        self._file.write(view)
        self._unflushed_bytes += len(view)
        if self._unflushed_bytes >= FLUSH_BYTES:
            self.make_durable()
        return len(view)

    def make_durable(self) -> None:
        """Wait until all written bytes are on the drive."""
        self._file.flush()
        os.fsync(self._file.fileno())
        drop_cache(self._file.fileno())
        self._unflushed_bytes = 0


class SummedFile(FlushedFile):
    """A new file that is written sequentially, with a running CRC-32; made by `create`."""

    def __init__(self, file: BinaryIO, advance: Advance | None) -> None:
        super().__init__(file)
        self._advance = advance
        self.nbytes = 0
        self.crc32 = 0

    @classmethod
    @contextmanager
    def create(cls, path: Path, advance: Advance | None = None) -> Iterator[SummedFile]:
        """Create a file that must not exist; on a clean exit all of it is on the drive.

        Raises:
            CheckpointError: The file cannot be created or written.
        """
        try:
            with path.open("xb") as file:
                made = cls(file, advance)
                yield made
                made.make_durable()
        except MemAscendError:  # of a tensor that is read meanwhile, or of a file within
            raise
        except OSError as error:
            raise CheckpointError(
                f"cannot write {path}: {error.strerror or error}. Likely cause: the file system "
                "of the checkpoint is full, or gone. What was saved before is untouched; free "
                "some space and save again"
            ) from error

    def write(self, piece: Any) -> int:
        """Append an object with a buffer; return its bytes, as files do."""
        nbytes = super().write(piece)
        self.crc32 = zlib.crc32(memoryview(piece).cast("B"), self.crc32)
        self.nbytes += nbytes
        if self._advance is not None:
            self._advance(nbytes)
        return nbytes

    def flush(self) -> None:
        """Do nothing: `create` syncs the file at its end."""


def drop_cache(descriptor: int) -> None:
    """Ask the kernel to forget the cached pages of a file; those not yet written stay."""
    with suppress(OSError):  # a hint that not every file system supports
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def sum_file(path: Path, advance: Advance) -> tuple[int, int]:
    """Read a file once; return its size in bytes and the CRC-32 of its content.

    Raises:
        OSError: The file cannot be read.
    """
    view = memoryview(bytearray(PIECE_BYTES))
    crc32 = nbytes = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(view):
            crc32 = zlib.crc32(view[:count], crc32)
            nbytes += count
            advance(count)
            if nbytes % FLUSH_BYTES < count:
                drop_cache(file.fileno())
        drop_cache(file.fileno())
    return nbytes, crc32


class Reader(Protocol):
    """Source of the bytes of a tensor, read in pieces."""

    def fill(self, begin_bytes: int, target: torch.Tensor) -> None:
        """Fill a uint8 tensor in host memory with the bytes from `begin_bytes` on."""

    def close(self) -> None:
        """Release file and pages; the next `fill` opens them again."""


class FileReader:
    """Reads the bytes of a tensor from a file; past its end they are zeros."""

    def __init__(self, path: Path) -> None:
        """Note the path; `fill` opens it: a checkpoint has more files than a process may open."""
        self._path = path
        self._file: BinaryIO | None = None

    def fill(self, begin_bytes: int, target: torch.Tensor) -> None:
        """Fill a uint8 tensor in host memory with the bytes from `begin_bytes` on."""
        if self._file is None:
            self._file = self._path.open("rb", buffering=0)
        view = target.numpy().data
        self._file.seek(begin_bytes)
        filled = 0
        while filled < len(view):
            count = self._file.readinto(view[filled:])  # type: ignore[attr-defined]
            if not count:
                target[filled:].zero_()
                return
            filled += count
        if (begin_bytes + filled) % FLUSH_BYTES < filled:
            drop_cache(self._file.fileno())

    def close(self) -> None:
        """Close the file and drop its pages; the next `fill` opens it again."""
        file, self._file = self._file, None
        if file is not None:
            drop_cache(file.fileno())
            file.close()


class TensorReader:
    """Reads the bytes of a tensor in memory or in a mapped file; past its end they are zeros."""

    def __init__(self, load: Callable[[], torch.Tensor], *, is_mapped: bool = False) -> None:
        """Note the loader. `fill` calls it: the number of mappings of a process is limited.

        The pages of a mapped file are paged out after they were read.
        """
        self._load = load
        self._data: torch.Tensor | None = None
        self._is_mapped = is_mapped
        self._read_bytes = 0

    def fill(self, begin_bytes: int, target: torch.Tensor) -> None:
        """Fill a uint8 tensor in host memory with the bytes from `begin_bytes` on."""
        if self._data is None:
            self._data = self._load().detach().contiguous().view(-1).view(torch.uint8)
        count = max(0, min(target.numel(), self._data.numel() - begin_bytes))
        if count:
            target[:count].copy_(self._data[begin_bytes : begin_bytes + count])
        target[count:].zero_()
        self._read_bytes += count
        if self._read_bytes >= FLUSH_BYTES:
            self._page_out(self._data)

    def close(self) -> None:
        """Release tensor and pages; the next `fill` loads it again."""
        data, self._data = self._data, None
        if data is not None:
            self._page_out(data)

    def _page_out(self, data: torch.Tensor) -> None:
        """Page out the pages of a mapped file that were read."""
        if self._read_bytes and self._is_mapped:
            begin = data.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
            page_out(begin, data.data_ptr() + data.nbytes - begin)
        self._read_bytes = 0
