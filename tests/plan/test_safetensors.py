"""Shapes from safetensors files: what is read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memascend.errors import ConfigError
from memascend.plan.shapes import ModelShapes, TensorShape, from_config, from_safetensors


def named(shapes: ModelShapes) -> list[tuple[str, tuple[int, ...]]]:
    return [(tensor.name, tensor.shape) for tensor in shapes.tensors]


def entry(shape: list[int], begin: int = 0, dtype: str = "BF16") -> dict[str, Any]:
    numel = 1
    for size in shape:
        numel *= size
    itemsize = {"BF16": 2, "F32": 4, "U8": 1, "BOOL": 1, "I32": 4, "I64": 8}[dtype]
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + numel * itemsize]}


def write(path: Path, header: object, data_bytes: int = 4096) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data_bytes))
    return path


def test_a_safetensors_file_gives_what_may_be_a_parameter(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "layers.10.w": entry([4, 8]),
        "layers.2.w": entry([3]),
        "mask": entry([8, 8], dtype="BOOL"),
        "steps": entry([1], dtype="I64"),
    }
    shapes = from_safetensors(write(tmp_path / "m.safetensors", header))
    assert named(shapes) == [("layers.2.w", (3,)), ("layers.10.w", (4, 8))]


def test_what_is_no_float_is_frozen_in_its_own_bytes(tmp_path: Path) -> None:
    """Four bits each as bitsandbytes packs them, eight weights in a number, and two in a byte."""
    header = {
        "a": entry([64, 1], dtype="U8"),
        "b": entry([4, 8], dtype="I32"),
        "c": {"dtype": "F4", "shape": [4, 8], "data_offsets": [0, 16]},
        "d": entry([5], dtype="F32"),
    }
    shapes = from_safetensors(write(tmp_path / "m.safetensors", header))
    assert shapes.tensors == (
        TensorShape("a", (64, 1), trainable=False, itemsize=1),
        TensorShape("b", (4, 8), trainable=False, itemsize=4),
        TensorShape("c", (16,), trainable=False, itemsize=1),
        TensorShape("d", (5,)),  # of any width: it is trained in the model's dtype
    )


def test_an_index_may_list_tensors_that_are_no_floats(tmp_path: Path) -> None:
    write(tmp_path / "1.safetensors", {"a": entry([2], dtype="U8"), "b": entry([1], dtype="BOOL")})
    index = tmp_path / "model.safetensors.index.json"
    weight_map = {"a": "1.safetensors", "b": "1.safetensors"}
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert named(from_safetensors(index)) == [("a", (2,))]


def test_what_safetensors_itself_writes_can_be_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    numpy_free = pytest.importorskip("safetensors.torch")
    numpy_free.save_file({"a": torch.zeros(3, 5)}, tmp_path / "m.safetensors")
    assert named(from_safetensors(tmp_path)) == [("a", (3, 5))]


def test_an_index_and_its_folder_give_the_tensors_of_all_files(tmp_path: Path) -> None:
    write(tmp_path / "1.safetensors", {"a": entry([2]), "unlisted": entry([9])})
    write(tmp_path / "2.safetensors", {"b": entry([3])})
    index = tmp_path / "model.safetensors.index.json"
    weight_map = {"a": "1.safetensors", "b": "2.safetensors"}
    index.write_text(json.dumps({"weight_map": weight_map}))
    for source in (index, tmp_path):
        assert named(from_safetensors(source)) == [("a", (2,)), ("b", (3,))]


@pytest.mark.parametrize("file_name", ["../1.safetensors", "", "..", ".", "/etc/passwd", 7])
def test_an_index_cannot_point_elsewhere(tmp_path: Path, file_name: object) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": file_name}}))
    with pytest.raises(ConfigError, match="beside it"):
        from_safetensors(index)


def test_an_index_that_disagrees_with_its_files_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "1.safetensors", {"a": entry([2])})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"b": "1.safetensors"}}))
    with pytest.raises(ConfigError, match='"b"'):
        from_safetensors(index)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "not a safetensors file"),
        ((4).to_bytes(8, "little") + b"nope", "not JSON"),
        ((4).to_bytes(8, "little") + b"\xff\xfe\xff\xfe", "not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "JSON object"),
    ],
)
def test_what_is_not_safetensors_is_an_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        from_safetensors(path)


@pytest.mark.parametrize(
    "damaged",
    [
        "text",
        {"dtype": "F32", "shape": [2]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": [2], "data_offsets": [4, 2]},
        {"dtype": "U8", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": 3, "shape": [2], "data_offsets": [0, 8]},
    ],
)
def test_a_damaged_entry_is_an_error_that_names_it(tmp_path: Path, damaged: object) -> None:
    path = write(tmp_path / "m.safetensors", {"weight": damaged})
    with pytest.raises(ConfigError, match='"weight" is damaged'):
        from_safetensors(path)


def test_a_file_that_is_cut_off_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"weight": entry([4096])}, data_bytes=100)
    with pytest.raises(ConfigError, match="broke off"):
        from_safetensors(path)


def test_a_folder_without_safetensors_and_a_missing_file_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \.safetensors file"):
        from_safetensors(tmp_path)
    with pytest.raises(ConfigError, match="cannot read"):
        from_safetensors(tmp_path / "missing.safetensors")


@pytest.mark.parametrize("name", ["layers.\u00b2", "layers." + "7" * 5000])
def test_names_are_put_in_order_whatever_their_numbers(tmp_path: Path, name: str) -> None:
    header = {
        key: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
        for key in (name, "layers.10", "layers.2")
    }
    path = write(tmp_path / "m.safetensors", header, 4)
    names = [tensor.name for tensor in from_safetensors(path).tensors]
    assert names.index("layers.2") < names.index("layers.10")


@pytest.mark.parametrize("shape", [[1] * 65, [1 << 63], [10**4000] * 60])
def test_a_shape_beyond_reason_is_damaged(tmp_path: Path, shape: list[int]) -> None:
    header = {"weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}
    path = write(tmp_path / "m.safetensors", header, 4)
    with pytest.raises(ConfigError, match='"weight" is damaged') as caught:
        from_safetensors(path)
    assert len(str(caught.value)) < 5000


@pytest.mark.parametrize("text", ["[" * 100_000, '{"weight_map": {"a": 1, "a": 2}}'])
def test_json_that_cannot_be_read_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="is not JSON"):
        from_config(tmp_path / "config.json")
