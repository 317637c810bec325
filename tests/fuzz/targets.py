"""What is fuzzed: readers of what somebody else may have written, and what must hold of each.

A target takes any bytes. It raises when something else than the reader's documented error comes
out, or when what the reader accepts is not what it promises. Used by run.py with atheris, and by
test_targets.py without.
"""

from __future__ import annotations

import json
import math
import os
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from memascend.checkpoint.manifest import ITEMSIZES, PADDING_BYTES_MAX, manifest_name, read_manifest
from memascend.config import block as config
from memascend.errors import CheckpointError, ConfigError
from memascend.plan import safetensors, shapes
from memascend.plan.context import widths_of
from memascend.plan.layers import layer_bytes
from memascend.volumes.header import HEADER_BYTES, Header, HeaderError, new_header, parse
from memascend.volumes.kept import read_kept, write_kept
from memascend.volumes.signatures import _MAGICS, find_signatures
from memascend.volumes.weights import CACHE_FILE
from tests.fuzz.mutations import (
    Mutate,
    mutate_bytes,
    mutate_header,
    mutate_json,
    mutate_safetensors,
)
from tests.support.manifest_content import manifest_content

INT64_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Target:
    """One reader.

    Attributes:
        check: Raises for a violation.
        seeds: Inputs to start from.
        mutate: How inputs change.
        bytes_max: Of an input.
    """

    check: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    mutate: Mutate
    bytes_max: int = 1 << 13


def _as_json(*values: object) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


def _check_message(error: Exception) -> None:
    """It can be read."""
    assert len(str(error)) < 20_000


_scratches: list[tempfile.TemporaryDirectory[str]] = []  # for as long as the process


def _scratch() -> Path:
    _scratches.append(tempfile.TemporaryDirectory(prefix="memascend-fuzz-"))
    return Path(_scratches[-1].name)


# The header of a raw volume.

DEVICE_BYTES = 1 << 40


def check_header(data: bytes) -> None:
    try:
        header = parse(data, device_bytes=DEVICE_BYTES)
    except HeaderError:
        return
    if header is None:
        assert not data.startswith(b"memascend volume")
        return
    assert header.pack() == data
    assert HEADER_BYTES < header.size_bytes <= DEVICE_BYTES
    assert header.size_bytes % 4096 == 0


def header_seeds() -> list[bytes]:
    headers = (
        new_header(device_bytes=DEVICE_BYTES, owner_uid=1000),
        Header(uuid=new_header(device_bytes=1, owner_uid=0).uuid, size_bytes=1, owner_uid=0),
    )
    return [header.pack() for header in headers]


# Signatures: bytes 0..7 are the size of the device, then (offset, 8 bytes of content) each.


def check_signatures(data: bytes) -> None:
    device_bytes = int.from_bytes(data[:8], "little") % (1 << 45)
    contents = [
        (int.from_bytes(data[at : at + 8], "little") % max(device_bytes, 1), data[at + 8 : at + 16])
        for at in range(8, len(data) - 15, 16)
    ]
    count = 0

    def read(offset: int, nbytes: int) -> bytes:
        nonlocal count
        count += 1
        assert offset >= 0
        assert 0 < nbytes <= 4096
        return on_device(offset, nbytes)

    def on_device(offset: int, nbytes: int) -> bytes:
        block = bytearray(max(0, min(nbytes, device_bytes - offset)))
        for place, content in contents:
            for at, byte in enumerate(content, place - offset):
                if 0 <= at < len(block):
                    block[at] = byte
        return bytes(block)

    found = find_signatures(read, device_bytes)
    assert count < 1000
    assert len(found) == len(set(found))
    for magic in _MAGICS:
        offset = magic.offset if magic.offset >= 0 else device_bytes + magic.offset
        if offset >= 0 and on_device(offset, len(magic.content)) == magic.content:
            assert magic.name in found


def signatures_seeds() -> list[bytes]:
    seeds = []
    for device_bytes in (0, 511, 65536, 1 << 30):
        for magic in _MAGICS:
            offset = magic.offset % device_bytes if device_bytes else 0
            content = magic.content[:8].ljust(8, b"\0")
            seeds.append(struct.pack("<QQ", device_bytes, offset) + content)
    return seeds


# The manifest of a checkpoint.


class _Checkpoint:
    """A folder with links that lead out of it."""

    def __init__(self) -> None:
        root = _scratch()
        (root / "secret").write_text("not yours")
        self.folder = root / "tag"
        (self.folder / "inside").mkdir(parents=True)
        (self.folder / "inside/file").write_bytes(b"x")
        (self.folder / "link").symlink_to(root)
        (self.folder / "loop").symlink_to("loop")
        self.manifest = self.folder / manifest_name(0)
        self.real = os.path.realpath(self.folder)


_checkpoint: list[_Checkpoint] = []


def check_manifest(data: bytes) -> None:
    if not _checkpoint:
        _checkpoint.append(_Checkpoint())
    place = _checkpoint[0]
    place.manifest.write_bytes(data)
    try:
        manifest = read_manifest(place.folder, 0)
    except CheckpointError as error:
        _check_message(error)
        return
    assert manifest is not None
    assert manifest.rank == 0
    sizes = {file.name: file.nbytes for file in manifest.files}
    assert len(sizes) == len(manifest.files)
    for name, nbytes in sizes.items():
        path = place.folder / name
        path.is_file()  # raises nothing
        assert os.path.realpath(path).startswith(place.real + os.sep), name
        assert 0 <= nbytes <= INT64_MAX
    for tensor in manifest.tensors:
        needed = tensor.numel * ITEMSIZES[tensor.dtype]
        assert needed <= sizes[tensor.file] < needed + PADDING_BYTES_MAX
        assert tensor.numel == manifest.sub_groups[tensor.sub_group].numel


def manifest_seeds() -> list[bytes]:
    content = manifest_content(
        [
            {"state": None, "dtype": "float32", "file": "a/b"},
            {"state": "exp_avg", "dtype": "float32", "file": "c"},
        ],
        [
            {"name": "a/b", "nbytes": 400, "crc32": "00c0ffee"},
            {"name": "c", "nbytes": 512, "crc32": "00000000"},
        ],
    )
    return _as_json(content, {**content, "sub_groups": [], "tensors": [], "files": []})


# The block of the config, as a value and as text in the environment.


def check_config(data: bytes) -> None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return
    try:
        block = config.find_block({"memascend": value})
        parsed = None if block is None else config.parse_block(block)
    except ConfigError as error:
        _check_message(error)
        return
    if parsed is not None:
        _check_parsed(parsed)


def check_config_text(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape").replace("\0", "")
    os.environ[config.CONFIG_VARIABLE] = text
    try:
        parsed = config.active_config({})
    except ConfigError as error:
        _check_message(error)
        return
    if parsed is not None:
        _check_parsed(parsed)


def _check_parsed(parsed: config.MemAscendConfig) -> None:
    assert config.parse_block(parsed.model_dump()) == parsed
    assert 1 <= parsed.direct_nvme.queue_depth <= 4096
    assert 64 << 10 <= parsed.direct_nvme.chunk_bytes <= 64 << 20
    for volume in parsed.volumes or ():
        assert volume.path
        _check_path(volume.path)
        assert volume.weight is None or 0 < volume.weight <= 1000
        assert volume.capacity is None or 1 << 20 <= volume.capacity <= 1 << 60
    limit = config.parse_limit(parsed.host_memory_limit, available=1 << 34)
    assert limit is None or 0 < limit <= INT64_MAX
    if parsed.report is not None:
        _check_path(parsed.report)


def _check_path(path: str) -> None:
    assert "\0" not in path
    os.fsencode(path)  # raises nothing


def config_seeds() -> list[bytes]:
    return _as_json(
        {},
        {"enabled": False, "host_memory_limit": "6GiB", "report": "out.json"},
        {"host_memory_limit": 0.5, "allocator": {"huge_pages": "off"}},
        {"volumes": ["/a", {"path": "/b", "weight": 2, "raw": True, "capacity": "10GB"}]},
        {"direct_nvme": {"engine": "uring", "queue_depth": 8, "chunk_bytes": "1MiB"}},
        {"streaming": {"optimizer": {"tile_bytes": 65536}, "gradients": {"enabled": False}}},
        {"wear": {"endurance": "600TB", "write_budget": 1, "over_budget": "stop"}},
        {"buffer_pool": {"prefetch_bytes": "1GiB"}, "overflow_check": {"enabled": False}},
    )


# What was remembered of the drives' speed.


def check_weights(data: bytes) -> None:
    path = _weights_folder() / CACHE_FILE
    path.write_bytes(data)
    entries = read_kept(path)
    for key, weights in entries.items():
        assert all(math.isfinite(weight) and 0 < weight <= 1_000_000 for weight in weights), key
    write_kept(path, {**entries, "new": [1.0, 2.0]})
    assert read_kept(path)["new"] == [1.0, 2.0]


def _weights_folder() -> Path:
    if not _folders:
        _folders.append(_scratch())
    return _folders[0]


_folders: list[Path] = []


def weights_seeds() -> list[bytes]:
    return _as_json({}, {'["a", "b"]': [1.0, 2.5], "c": [1, 1, 3]})


# The shapes of a model: safetensors, their index, and config.json.


def check_safetensors(data: bytes) -> None:
    path = _weights_folder() / "model.safetensors"
    path.write_bytes(data)
    try:
        model = shapes.from_safetensors(path)
    except ConfigError as error:
        _check_message(error)
        return
    _check_model(model)
    room = len(data) - 8
    assert all(tensor.numel <= room for tensor in model.tensors)


def safetensors_seeds() -> list[bytes]:
    header = {
        "__metadata__": {"format": "pt"},
        "layers.2.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "layers.10.mask": {"dtype": "BOOL", "shape": [4], "data_offsets": [24, 28]},
        "norm": {"dtype": "BF16", "shape": [], "data_offsets": [28, 30]},
        "packed": {"dtype": "U8", "shape": [2, 1], "data_offsets": [30, 32]},
        "halves": {"dtype": "F4", "shape": [4], "data_offsets": [32, 34]},
    }
    text = json.dumps(header).encode()
    return [struct.pack("<Q", len(text)) + text + bytes(34)]


def check_index(data: bytes) -> None:
    folder = _weights_folder()
    (folder / "part.safetensors").write_bytes(safetensors_seeds()[0])
    index = folder / "model.safetensors.index.json"
    index.write_bytes(data)
    try:
        files = safetensors._files(index)
        assert all(os.path.dirname(path) == str(folder) for path, _ in files)
        _check_model(shapes.from_safetensors(index))
    except ConfigError as error:
        _check_message(error)


def index_seeds() -> list[bytes]:
    part = "part.safetensors"
    return _as_json({"weight_map": {"layers.2.weight": part, "norm": part}})


def check_model_config(data: bytes) -> None:
    path = _weights_folder() / "config.json"
    path.write_bytes(data)
    try:
        model = shapes.from_config(path)
        _check_model(model)
        found = layer_bytes(widths_of(model), 2)
    except ConfigError as error:
        _check_message(error)
        return
    assert found.backward > found.saved > found.hidden > 0


def _check_model(model: shapes.ModelShapes) -> None:
    assert 0 < model.numel <= INT64_MAX
    assert len(model.tensors) < 1_000_000
    for tensor in model.tensors:
        assert all(type(size) is int and size >= 0 for size in tensor.shape)
    assert model.layers()
    assert model.sub_groups(world=2, sub_group_size=1 << 30, has_decay_groups=True)


def model_config_seeds() -> list[bytes]:
    common = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    llama = {**common, "vocab_size": 100, "intermediate_size": 128, "tie_word_embeddings": True}
    gpt2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "vocab_size": 100}
    return _as_json(
        *({"model_type": name, **llama} for name in ("llama", "qwen2", "qwen3", "mixtral")), gpt2
    )


TARGETS: dict[str, Target] = {
    "header": Target(check_header, header_seeds, mutate_header, 1 << 13),
    "signatures": Target(check_signatures, signatures_seeds, mutate_bytes, 1 << 10),
    "manifest": Target(check_manifest, manifest_seeds, mutate_json),
    "config": Target(check_config, config_seeds, mutate_json),
    "config_text": Target(check_config_text, config_seeds, mutate_json),
    "weights": Target(check_weights, weights_seeds, mutate_json),
    "safetensors": Target(check_safetensors, safetensors_seeds, mutate_safetensors),
    "index": Target(check_index, index_seeds, mutate_json),
    "model_config": Target(check_model_config, model_config_seeds, mutate_json),
}
