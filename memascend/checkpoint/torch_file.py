"""Writes files like `torch.save`, with tensors that need not be in memory.

A torch file is a zip archive without compression: a pickle in which each tensor refers to a storage
by number, and a record with the bytes of each storage. Here some tensors are placeholders whose
bytes are produced while the file is written. `torch.load` reads the file, mapped or not. Knows
torch and the file system; never DeepSpeed.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch

from memascend.checkpoint.files import SummedFile

#: torch aligns records so that mapped tensors are aligned for any arithmetic.
_ALIGNMENT = 64
#: Id of the zip extra field that holds the padding: "FB", as torch writes it.
_PADDING_ID = b"FB"
_EXTRA_HEADER = struct.Struct("<2sH")
_LOCAL_HEADER_BYTES = 30
_ZIP64_EXTRA_BYTES = 20
_PROTOCOL = 2
_VERSION = b"3\n"

#: Appends the bytes of a tensor to a file.
Write = Callable[[Any], None]


@dataclass(frozen=True, eq=False, slots=True)
class StreamedTensor:
    """A placeholder of a flat tensor; `write` appends its bytes piece by piece."""

    numel: int
    dtype: torch.dtype
    write: Callable[[Write], None]

    @property
    def nbytes(self) -> int:
        """Bytes of its storage."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, eq=False, slots=True)
class _StorageOf:
    """The pickle's reference to the storage of a StreamedTensor, with an empty storage of its kind.

    torch has typed storages for older dtypes and an untyped one for newer ones such as float8.
    """

    tensor: StreamedTensor
    empty: torch.storage.TypedStorage | torch.UntypedStorage


class _Pickler(pickle.Pickler):
    """A pickler like torch's; collects the storages it encounters."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.storages: list[torch.UntypedStorage | StreamedTensor] = []
        self._numbers: dict[int, str] = {}

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, StreamedTensor):
            # Reduce an empty tensor of this dtype as torch does, then replace storage and shape.
            empty = torch.empty(0, dtype=value.dtype, device="cpu")
            rebuild, arguments = empty.__reduce_ex__(_PROTOCOL)  # type: ignore[no-untyped-call]
            storage, offset, _, strides, *rest = arguments
            shape = (value.numel,)
            return rebuild, (_StorageOf(value, storage), offset, shape, strides, *rest)
        return NotImplemented

    def persistent_id(self, value: object) -> Any:
        if isinstance(value, _StorageOf):
            tensor, kind = value.tensor, _kind(value.empty)
            count = tensor.nbytes if kind is torch.UntypedStorage else tensor.numel
            return "storage", kind, self._number(id(tensor), tensor), "cpu", count
        if isinstance(value, torch.storage.TypedStorage):
            storage = value._untyped_storage
            number = self._number(storage._cdata, storage)
            size = value._size()  # type: ignore[no-untyped-call]
            return "storage", _kind(value), number, "cpu", size
        if isinstance(value, torch.UntypedStorage):
            number = self._number(value._cdata, value)
            return "storage", torch.UntypedStorage, number, "cpu", value.nbytes()
        return None

    def _number(self, identity: int, storage: torch.UntypedStorage | StreamedTensor) -> str:
        if identity not in self._numbers:
            self._numbers[identity] = str(len(self.storages))
            self.storages.append(storage)
        return self._numbers[identity]


def _kind(storage: torch.storage.TypedStorage | torch.UntypedStorage) -> Any:
    """Return the storage class that torch's files name."""
    if isinstance(storage, torch.UntypedStorage):
        return torch.UntypedStorage
    return getattr(torch, storage._pickle_storage_type())  # type: ignore[no-untyped-call]


def save_streamed(content: object, file: SummedFile) -> None:
    """Write `content` to a new file as torch.save does, with any StreamedTensor as a tensor.

    Raises:
        ValueError: A StreamedTensor wrote another number of bytes than its size.
    """
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(content)
    # SummedFile has no seek, so sizes follow each record, as in torch's own files.
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:  # type: ignore[call-overload]
        with _record(archive, file, "data.pkl") as append:
            append(pickled.getbuffer())
        with _record(archive, file, "byteorder") as append:
            append(sys.byteorder.encode())
        for number, storage in enumerate(pickler.storages):
            with _record(archive, file, f"data/{number}") as append:
                if isinstance(storage, StreamedTensor):
                    begin = file.nbytes
                    storage.write(append)
                    if (count := file.nbytes - begin) != storage.nbytes:
                        raise ValueError(f"a tensor of {storage.nbytes} bytes handed over {count}")
                elif storage.nbytes():
                    append(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())
        with _record(archive, file, "version") as append:
            append(_VERSION)


@contextmanager
def _record(archive: zipfile.ZipFile, file: SummedFile, name: str) -> Iterator[Write]:
    """Append a record whose bytes are aligned."""
    record = zipfile.ZipInfo(f"archive/{name}")
    begin = file.nbytes + _LOCAL_HEADER_BYTES + len(record.filename) + _ZIP64_EXTRA_BYTES
    padding_bytes = -(begin + _EXTRA_HEADER.size) % _ALIGNMENT
    record.extra = _EXTRA_HEADER.pack(_PADDING_ID, padding_bytes) + bytes(padding_bytes)
    with archive.open(record, "w", force_zip64=True) as target:
        if file.nbytes % _ALIGNMENT:
            raise AssertionError(f"record {name} begins at byte {file.nbytes}")
        yield cast(Write, target.write)
