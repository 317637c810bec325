"""A tensor from pieces: every byte in its place, few files open, little memory."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from memascend.base.units import MIB  # noqa: E402
from memascend.checkpoint.files import FLUSH_BYTES, FileReader, TensorReader  # noqa: E402
from memascend.checkpoint.pieces import OPEN_COUNT_MAX, ByteSpan, PieceReader  # noqa: E402


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), max_size=8), st.integers(1, 40))
def test_pieces_are_put_together_and_gaps_are_zero(
    parts: list[tuple[int, int]], chunk_bytes: int
) -> None:
    source = torch.arange(1, 201, dtype=torch.uint8)
    expected = bytearray()
    spans = []
    for number, (gap, nbytes) in enumerate(parts):
        expected += bytes(gap)
        spans.append(ByteSpan(len(expected), nbytes, TensorReader(source.detach), number * 5))
        expected += bytes(source[number * 5 : number * 5 + nbytes].tolist())
    reader = PieceReader(spans)
    found = b""
    for begin in range(0, len(expected) + 3, chunk_bytes):
        target = torch.full((chunk_bytes,), 7, dtype=torch.uint8)
        reader.fill(begin, target)
        found += bytes(target.tolist())
    assert found[: len(expected)] == bytes(expected)
    assert not any(found[len(expected) :])


def open_files(folder: Path) -> int:
    """How many files of a folder this process has open; tests before may have left others."""
    return sum(Path(file.path).parent == folder for file in psutil.Process().open_files())


def test_few_of_many_files_are_open(tmp_path: Path) -> None:
    spans = []
    for number in range(3 * OPEN_COUNT_MAX):
        path = tmp_path / str(number)
        path.write_bytes(bytes([number]))
        spans.append(ByteSpan(number, 1, FileReader(path), 0))
    reader = PieceReader(spans)
    target = torch.empty(len(spans), dtype=torch.uint8)
    for _ in range(2):  # what was closed is opened again
        reader.fill(0, target)
        assert target.tolist() == list(range(len(spans)))
        assert open_files(tmp_path) == OPEN_COUNT_MAX
    reader.close()
    assert open_files(tmp_path) == 0


def mapped_bytes() -> int:
    """Pages of files in this process's memory."""
    status = Path("/proc/self/status").read_text()
    match = re.search(r"RssFile:\s+(\d+) kB", status)
    assert match is not None
    return int(match[1]) * 1024


def test_of_a_mapped_file_few_pages_stay_in_memory(tmp_path: Path) -> None:
    numel = 4 * FLUSH_BYTES
    path = tmp_path / "values.pt"
    torch.save(torch.ones(numel, dtype=torch.uint8), path)
    tensor = torch.load(path, mmap=True)
    reader = TensorReader(lambda: tensor, is_mapped=True)
    target = torch.empty(MIB, dtype=torch.uint8)
    before = peak = mapped_bytes()
    for begin in range(0, numel, MIB):
        reader.fill(begin, target)
        assert target.all()
        peak = max(peak, mapped_bytes())
    assert peak - before < 2 * FLUSH_BYTES
    assert tensor.sum() == numel  # nothing of it is lost
