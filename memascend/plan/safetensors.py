"""Shapes of tensors in safetensors files, from their headers alone.

The headers are not trusted: every length in them is checked before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memascend.base.json_text import parse_json, read_json_object, show_json
from memascend.base.units import NBYTES_MAX
from memascend.errors import ConfigError

#: Limit of the safetensors library.
HEADER_BYTES_MAX = 100_000_000
DIMENSION_COUNT_MAX = 64
#: Bytes of one element.
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
PACKED_BYTES = {"U8": 1, "I8": 1, "U16": 2, "I16": 2, "U32": 4, "I32": 4}
#: Dtypes of masks and counters, which are not parameters.
NO_PARAMETERS = {"BOOL": 1, "U64": 8, "I64": 8}
_ITEMSIZES = FLOAT_BYTES | PACKED_BYTES | NO_PARAMETERS


@dataclass(frozen=True, slots=True)
class StoredShape:
    """One tensor of a file."""

    name: str
    shape: tuple[int, ...]  # its shape; for an unknown dtype its bytes, in one dimension
    itemsize: int | None  # bytes of an element that is not a float; None: a float of any width


def read_shapes(path: Path) -> Iterator[StoredShape]:
    """Yield the possible parameters of a file, of an index's files or of a folder's files.

    Raises:
        ConfigError: A file is missing, not safetensors, or damaged.
    """
    for file, wanted in _files(path):
        found = _read_header(file)
        missing = sorted(wanted - set(found))
        if missing:
            raise ConfigError(
                f"{path} lists {show_json(missing[0])} in {file.name}, which does not hold it. "
                "Likely cause: files of different checkpoints in one folder. Download them again"
            )
        kept = wanted or set(found)
        yield from (one for key, one in found.items() if key in kept and one is not None)


def _files(path: Path) -> list[tuple[Path, set[str]]]:
    """Return the files to read, each with the tensor names to take from it (empty: all)."""
    if path.is_dir():
        index = path / "model.safetensors.index.json"
        if index.exists():
            return _files(index)
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"{path} holds no .safetensors file and no index of such files")
        return [(file, set()) for file in files]
    if path.suffix != ".json":
        return [(path, set())]
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f'{path} has no "weight_map": it is not an index of safetensors files')
    names_of: dict[str, set[str]] = {}
    for key, file_name in weight_map.items():
        is_beside = isinstance(file_name, str) and file_name == Path(file_name).name
        if not is_beside or file_name in ("", ".."):
            raise ConfigError(
                f"{path}: {show_json(key)} must name a file beside it, got {show_json(file_name)}"
            )
        names_of.setdefault(file_name, set()).add(key)
    return [(path.parent / file_name, names) for file_name, names in sorted(names_of.items())]


def _read_header(path: Path) -> dict[str, StoredShape | None]:
    """Return the shapes of a file's tensors by name; None for tensors that are not parameters."""
    try:
        with path.open("rb") as file:
            file_bytes = file.seek(0, 2)
            file.seek(0)
            header_bytes = int.from_bytes(file.read(8), "little")
            if file_bytes < 8 or not 2 <= header_bytes <= min(HEADER_BYTES_MAX, file_bytes - 8):
                raise ConfigError(
                    f"{path} is not a safetensors file: its first 8 bytes announce a header of "
                    f"{header_bytes} bytes in a file of {file_bytes}. Likely cause: a Git LFS "
                    "pointer or a download that broke off"
                )
            header = parse_json(file.read(header_bytes))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: the safetensors header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ConfigError(f"{path}: the safetensors header must be a JSON object")
    room_bytes = file_bytes - 8 - header_bytes
    return {
        key: _entry_shape(path, key, entry, room_bytes)
        for key, entry in header.items()
        if key != "__metadata__"
    }


def _entry_shape(path: Path, key: str, entry: Any, room_bytes: int) -> StoredShape | None:
    is_sound = (
        isinstance(entry, dict)
        and isinstance(entry.get("dtype"), str)
        and _is_counts(entry.get("shape"))
        and _is_counts(entry.get("data_offsets"))
        and len(entry["data_offsets"]) == 2
    )
    if is_sound:
        begin, end = entry["data_offsets"]
        itemsize = _ITEMSIZES.get(entry["dtype"])
        is_sound = begin <= end and (
            itemsize is None or end - begin == itemsize * math.prod(entry["shape"])
        )
    if not is_sound:
        raise ConfigError(
            f"{path}: the header entry of {show_json(key)} is damaged: {show_json(entry)}"
        )
    if entry["data_offsets"][1] > room_bytes:
        raise ConfigError(
            f"{path}: {show_json(key)} ends at byte {entry['data_offsets'][1]} of {room_bytes}. "
            "Likely cause: a download that broke off"
        )
    dtype = entry["dtype"]
    if dtype in NO_PARAMETERS:
        return None
    if dtype in _ITEMSIZES:
        return StoredShape(key, tuple(entry["shape"]), PACKED_BYTES.get(dtype))
    return StoredShape(key, (end - begin,), 1)  # such as dtypes that pack two numbers in a byte


def _is_counts(value: Any) -> bool:
    """Return whether a value is a short list of numbers whose product can be computed."""
    if not isinstance(value, list) or len(value) > DIMENSION_COUNT_MAX:
        return False
    return all(type(n) is int and 0 <= n < NBYTES_MAX for n in value)
