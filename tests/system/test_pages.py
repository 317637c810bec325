"""Hints about mapped pages: they go, and what is in them stays."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

from memascend.base.units import PAGE_BYTES
from memascend.system.pages import page_out


def test_pages_that_were_let_go_come_back_as_they_were(tmp_path: Path) -> None:
    content = bytes(range(256)) * (PAGE_BYTES // 64)
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        view = ctypes.c_char.from_buffer(mapped)
        page_out(ctypes.addressof(view), len(content))
        del view
        assert mapped[:] == content
