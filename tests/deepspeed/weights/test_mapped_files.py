"""Mapped files: their pages go, what is mapped stays as it is, and nothing else is touched."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from memascend.deepspeed.weights.mapped_files import MappedFiles, read_starts
from memascend.system.mounts import filesystem_of

PAGES = 64
NBYTES = PAGES * mmap.PAGESIZE
CONTENT = bytes(range(256)) * (NBYTES // 256)


def states(memory: mmap.mmap) -> bytes:
    """Of each page whether the page cache has it."""
    libc = ctypes.CDLL(None)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    found = ctypes.create_string_buffer(len(memory) // mmap.PAGESIZE)
    assert libc.mincore(address_of(memory), len(memory), found) == 0
    return bytes(state & 1 for state in found.raw)


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    if filesystem_of(tmp_path) in ("tmpfs", "overlay"):
        pytest.skip("temporary files are in memory here, or in layers")
    path = tmp_path / "a file"
    path.write_bytes(CONTENT)
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
    return path


@pytest.fixture
def memory(file: Path) -> Iterator[mmap.mmap]:
    """A private mapping that may be written to, all of it read."""
    with file.open("rb") as opened:
        view = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    assert view[:] == CONTENT
    assert sum(states(view)) == PAGES
    yield view
    view.close()


def test_all_pages_go_and_come_back_as_they_were(memory: mmap.mmap) -> None:
    with MappedFiles([address_of(memory) + 5]) as files:
        files.drop()
        assert sum(states(memory)) == 0
    assert memory[:] == CONTENT


def test_leaving_drops_what_was_read_since(memory: mmap.mmap) -> None:
    with MappedFiles([address_of(memory)]) as files:
        files.drop()
        assert memory[:] == CONTENT
    assert sum(states(memory)) == 0


def test_what_was_written_to_memory_is_kept(memory: mmap.mmap) -> None:
    memory[mmap.PAGESIZE : mmap.PAGESIZE + 3] = b"new"
    with MappedFiles([address_of(memory)]) as files:
        files.drop()
    assert memory[mmap.PAGESIZE : mmap.PAGESIZE + 3] == b"new"
    assert memory[2 * mmap.PAGESIZE :] == CONTENT[2 * mmap.PAGESIZE :]


def test_other_mappings_and_memory_without_a_file_are_left_alone(memory: mmap.mmap) -> None:
    with mmap.mmap(-1, NBYTES) as anonymous:
        anonymous.write(CONTENT)
        with MappedFiles([address_of(anonymous), 0]) as files:
            assert files.mappings == []
            files.drop()
        assert anonymous[:] == CONTENT
    assert sum(states(memory)) == PAGES


def test_a_file_that_was_removed_is_left_to_the_kernel(memory: mmap.mmap, file: Path) -> None:
    file.unlink()
    with MappedFiles([address_of(memory)]) as files:
        assert files.mappings == []
    assert memory[:] == CONTENT


def test_a_name_that_means_another_file_by_now_is_not_followed(
    memory: mmap.mmap, file: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.write_bytes(CONTENT)
    begin = address_of(memory)
    lines = [f"{begin:x}-{begin + NBYTES:x} rw-p 00000000 fe:00 {file.stat().st_ino}  {other}\n"]
    lines += ["7fff0000-7fff1000 rw-p 00000000 00:00 0  [stack]\n", "a line of another kind\n"]
    maps = tmp_path / "maps"
    maps.write_text("".join(lines))
    with MappedFiles([begin], maps) as files:
        assert [mapping.path for mapping in files.mappings] == [str(other)]
        assert files._descriptors == []


def test_files_in_memory_are_not_pushed_to_swap() -> None:
    folder = Path("/dev/shm")
    if not folder.is_dir() or filesystem_of(folder) != "tmpfs":
        pytest.skip("no tmpfs at /dev/shm")
    path = folder / f"memascend-test-{os.getpid()}"
    try:
        path.write_bytes(CONTENT)
        with path.open("rb") as opened:
            view = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        assert MappedFiles([address_of(view)]).mappings == []
        view.close()
    finally:
        path.unlink(missing_ok=True)


def test_without_proc_nothing_is_found(memory: mmap.mmap, tmp_path: Path) -> None:
    with MappedFiles([address_of(memory)], tmp_path / "missing") as files:
        assert files.mappings == []


# -- the beginnings of tensors -------------------------------------------------------------------


def safetensors_of(offsets: list[int], nbytes: int) -> bytes:
    header = {f"tensor{begin}": {"data_offsets": [begin, begin + 1]} for begin in offsets}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(nbytes)


def test_the_header_is_read_and_of_each_tensor_one_page(file: Path) -> None:
    tensors = [0, 16 * mmap.PAGESIZE, 48 * mmap.PAGESIZE]
    content = safetensors_of(tensors, NBYTES)
    file.write_bytes(content + bytes(-len(content) % mmap.PAGESIZE))
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        view = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    if sum(states(view)):
        pytest.skip("this file system does not drop pages when asked")
    read_starts(str(file), tensors=False)
    assert [page for page, state in enumerate(states(view)) if state] == [0]
    read_starts(str(file), tensors=True)
    assert [page for page, state in enumerate(states(view)) if state] == [0, 16, 48]
    view.close()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        (1 << 60).to_bytes(8, "little"),
        (5).to_bytes(8, "little") + b"[1,2]",
        (9).to_bytes(8, "little") + b'{"a": {}}',
        (2).to_bytes(8, "little") + b"\xff\xfe",
        (30).to_bytes(8, "little") + b'{"a": {"data_offsets": [-999]}}',
        (31).to_bytes(8, "little") + b'{"a": {"data_offsets": [-999]}}',
        (32).to_bytes(8, "little") + b'{"a": {"data_offsets": [9e9999]}}',
        (49).to_bytes(8, "little") + b'{"a": {"data_offsets": [' + b"9" * 22 + b"]}}",
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
    ],
    ids=lambda content: content[8:38].decode("latin-1"),  # of the last one a little will do
)
def test_what_is_no_safetensors_file_is_left_to_the_library(content: bytes, file: Path) -> None:
    file.write_bytes(content)
    read_starts(str(file), tensors=True)
    read_starts(str(file.parent / "missing"), tensors=True)
