"""Files of torch whose tensors are streamed into them: torch reads what it would have written."""

from __future__ import annotations

import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from memascend.checkpoint.files import SummedFile, TensorReader  # noqa: E402
from memascend.checkpoint.torch_file import StreamedTensor, Write, save_streamed  # noqa: E402

PIECE_BYTES = 1000
#: Of what is trained, and of what may be frozen: quantised weights, tables, masks.
DTYPES = [
    *("float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2", "complex64"),
    *("uint8", "int8", "int16", "int32", "int64", "uint16", "bool"),
]


def streamed(tensor: Any) -> StreamedTensor:
    def write(append: Write) -> None:
        reader = TensorReader(lambda: tensor)
        for begin in range(0, tensor.nbytes, PIECE_BYTES):
            piece = torch.empty(min(PIECE_BYTES, tensor.nbytes - begin), dtype=torch.uint8)
            reader.fill(begin, piece)
            append(piece.numpy())

    return StreamedTensor(tensor.numel(), tensor.dtype, write)


def save(path: Path, content: object) -> SummedFile:
    with SummedFile.create(path) as file:
        save_streamed(content, file)
    return file


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_loads_streamed_tensors_beside_others(tmp_path: Path, dtype: str, mmap: bool) -> None:
    base = torch.arange(40.0)
    large = (100 * torch.randn(12_345)).to(getattr(torch, dtype))
    content = {
        "step": 3,
        "groups": [streamed(large), streamed(large[:7].clone()), torch.empty(0)],
        "views": OrderedDict(a=base[3:9], b=base.view(8, 5).t()),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "ints": torch.arange(5),
    }
    save(tmp_path / "file.pt", content)
    loaded = torch.load(tmp_path / "file.pt", mmap=mmap, weights_only=False)
    assert loaded["step"] == 3
    for found, given in zip(loaded["groups"], (large, large[:7]), strict=False):
        assert (found.dtype, found.shape) == (given.dtype, given.shape)
        assert torch.equal(found.view(torch.uint8), given.view(torch.uint8))
    assert loaded["groups"][2].numel() == 0
    assert torch.equal(loaded["views"]["a"], base[3:9])
    assert torch.equal(loaded["views"]["b"], base.view(8, 5).t())
    assert loaded["views"]["a"].untyped_storage().nbytes() == base.nbytes
    assert isinstance(loaded["parameter"], torch.nn.Parameter)
    assert torch.equal(loaded["ints"], torch.arange(5))


@pytest.mark.parametrize("dtype", ["float32", "uint8", "float8_e4m3fn"])
def test_torch_loads_it_when_only_weights_are_allowed(tmp_path: Path, dtype: str) -> None:
    given = torch.arange(100).to(getattr(torch, dtype))
    save(tmp_path / "file.pt", {"a": streamed(given)})
    loaded = torch.load(tmp_path / "file.pt", weights_only=True)
    assert loaded["a"].dtype == given.dtype
    assert torch.equal(loaded["a"].float(), given.float())


def test_records_are_aligned_and_sound(tmp_path: Path) -> None:
    tensors = [torch.randn(count) for count in (1, 17, 1000)]
    save(tmp_path / "file.pt", [streamed(tensor) for tensor in tensors])
    with zipfile.ZipFile(tmp_path / "file.pt") as archive:
        assert archive.testzip() is None
        assert "archive/version" in archive.namelist()
    reader = torch._C.PyTorchFileReader(str(tmp_path / "file.pt"))
    for number in range(3):
        assert reader.get_record_offset(f"data/{number}") % 64 == 0


def test_the_sum_is_that_of_the_file(tmp_path: Path) -> None:
    import zlib

    file = save(tmp_path / "file.pt", {"a": streamed(torch.randn(1000))})
    content = (tmp_path / "file.pt").read_bytes()
    assert (file.nbytes, file.crc32) == (len(content), zlib.crc32(content))


def test_a_tensor_that_hands_over_too_little_is_an_error(tmp_path: Path) -> None:
    short = StreamedTensor(10, torch.float32, lambda append: append(bytes(39)))
    with pytest.raises(ValueError, match="40 bytes handed over 39"):
        save(tmp_path / "file.pt", [short])
