"""Tensors of the store as files of a checkpoint, and back, a staging slot at a time.

Knows torch, the slots and the file system; never DeepSpeed. However large a tensor is, no more of
it is in memory than the slots hold, and what was written or read leaves the page cache behind.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch

from memascend.errors import CheckpointError
from memascend.streaming.staging import StagingSlots
from memascend.system.pages import page_out

#: About so many bytes of a file may be in the page cache, on their way to the drive or from it.
FLUSH_BYTES = 64 << 20

#: Told how many bytes have been moved since it was last called.
Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class FileSum:
    """What a file should hold: its size, and the CRC-32 of its bytes."""

    nbytes: int
    crc32: int


class SummedFile:
    """A new file that is written once from front to end, summed up and made durable."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        """Writes to `file`; use `create`."""
        self.path = path
        self._file = file
        self._flushed_bytes = 0
        self.nbytes = 0
        self.crc32 = 0

    @classmethod
    @contextmanager
    def create(cls, path: Path) -> Iterator[SummedFile]:
        """Makes a file that is not there; on a clean exit all of it is on the drive.

        Raises:
            CheckpointError: The file cannot be made or written.
        """
        try:
            with path.open("xb") as file:
                made = cls(path, file)
                yield made
                made._flush()
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(
                f"cannot write {path}: {error.strerror or error}. Likely cause: the file system "
                "of the checkpoint is full, or gone. What was saved before is untouched; free "
                "some space and save again"
            ) from error

    def write(self, piece: Any) -> int:
        """Appends anything with a buffer; gives its bytes, as files do."""
        view = memoryview(piece).cast("B")
        self._file.write(view)
        self.crc32 = zlib.crc32(view, self.crc32)
        self.nbytes += len(view)
        if self.nbytes - self._flushed_bytes >= FLUSH_BYTES:
            self._flush()
        return len(view)

    def flush(self) -> None:
        """Nothing: `create` makes all of it durable in the end."""

    def sum(self) -> FileSum:
        """Of all that was written."""
        return FileSum(self.nbytes, self.crc32)

    def _flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        drop_cache(self._file.fileno())
        self._flushed_bytes = self.nbytes


def drop_cache(descriptor: int) -> None:
    """Asks the kernel to forget the cached pages of a file; those not yet written stay."""
    with suppress(OSError):  # a hint, which not every file system takes
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def write_file(
    slots: StagingSlots,
    *,
    key: str,
    nbytes: int,
    padded_bytes: int,
    file: SummedFile,
    advance: Advance,
    also: Callable[[Any], object] | None = None,
) -> None:
    """Appends a key to a file, which is then filled up with zeros.

    Args:
        slots: Through which the bytes pass.
        key: In the store.
        nbytes: Of the key, from its beginning.
        padded_bytes: Size of the file in the end.
        file: A new one.
        advance: Told of progress.
        also: Gets the bytes of the key too.

    Raises:
        StoreError: The store could not be read.
    """
    for staged in slots.stream(key=key, nbytes=nbytes):
        file.write(staged.numpy())
        if also is not None:
            also(staged.numpy())
        advance(staged.numel())
    file.write(bytes(padded_bytes - nbytes))


class Slots(Protocol):
    """Memory for pieces of a file, lent for a while."""

    @property
    def slot_bytes(self) -> int:
        """The largest piece."""

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A piece to work in."""

    def give_back(self, staged: torch.Tensor) -> None:
        """Ends what `take` began."""


def sum_file(path: Path, slots: Slots, advance: Advance) -> FileSum:
    """Reads a file once.

    Raises:
        OSError: It cannot be read.
    """
    staged = slots.take(slots.slot_bytes, torch.uint8)
    view = staged.numpy().data
    crc32 = nbytes = 0
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(view):
                crc32 = zlib.crc32(view[:count], crc32)
                nbytes += count
                advance(count)
                if nbytes % FLUSH_BYTES < count:
                    drop_cache(file.fileno())
            drop_cache(file.fileno())
    finally:
        slots.give_back(staged)
    return FileSum(nbytes, crc32)


class Reader(Protocol):
    """Where the bytes of a tensor come from, in pieces."""

    def fill(self, begin_bytes: int, target: torch.Tensor) -> None:
        """Fills a uint8 tensor in host memory with the bytes from `begin_bytes` on."""

    def close(self) -> None:
        """Lets go of file and pages; reading on opens them again."""


class FileReader:
    """The bytes of a tensor in a file; behind its end there are zeros."""

    def __init__(self, path: Path) -> None:
        """Opens nothing before it is read: a checkpoint has more files than a process may open."""
        self._path = path
        self._file: BinaryIO | None = None

    def fill(self, begin_bytes: int, target: torch.Tensor) -> None:
        """Fills a uint8 tensor in host memory with the bytes from `begin_bytes` on."""
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
        """Closes it, and lets its pages go; reading on opens it again."""
        file, self._file = self._file, None
        if file is not None:
            drop_cache(file.fileno())
            file.close()


class TensorReader:
    """The same of a tensor in memory, or mapped into it."""

    def __init__(self, tensor: torch.Tensor, *, is_mapped: bool = False) -> None:
        """Keeps the tensor; of a file that is mapped, few pages stay in memory."""
        self._data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        self._is_mapped = is_mapped
        self._read_bytes = 0

    def fill(self, begin_bytes: int, target: torch.Tensor) -> None:
        """Fills a uint8 tensor in host memory with the bytes from `begin_bytes` on."""
        count = max(0, min(target.numel(), self._data.numel() - begin_bytes))
        if count:
            target[:count].copy_(self._data[begin_bytes : begin_bytes + count])
        target[count:].zero_()
        self._read_bytes += count
        if self._read_bytes >= FLUSH_BYTES:
            self.close()

    def close(self) -> None:
        """Gives back the pages of a mapped file that were read."""
        if self._read_bytes and self._is_mapped:
            _page_out(self._data)
        self._read_bytes = 0


def _page_out(data: torch.Tensor) -> None:
    """Lets the pages go that a tensor of a mapped file lies in."""
    begin = data.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    page_out(begin, data.data_ptr() + data.nbytes - begin)
