"""A stand-in for libcuda, so that registered memory is tested without a device."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from memascend import _core


class FakeCuda:
    """The stand-in for libcuda that the C++ tests use."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("c++") is None:
            pytest.skip("no c++ on the path to build the stand-in for libcuda")
        self.path = folder / "libfakecuda.so"
        source = Path(__file__).resolve().parents[1] / "cpp" / "support" / "fake_cuda.cpp"
        command = ["c++", "-std=c++17", "-shared", "-fPIC", "-o", str(self.path), str(source)]
        subprocess.run(command, check=True)
        self.library = ctypes.CDLL(str(self.path))

    def registrations(self) -> list[range]:
        begin, nbytes = ctypes.c_size_t(), ctypes.c_size_t()
        found = []
        for index in range(self.library.fake_live()):
            self.library.fake_registration(index, ctypes.byref(begin), ctypes.byref(nbytes))
            found.append(range(begin.value, begin.value + nbytes.value))
        return found


def make_core(cuda: FakeCuda, *, limit_bytes: int = 0) -> _core.Allocator:
    return registering_core(limit_bytes=limit_bytes, cuda_library=str(cuda.path))


def registering_core(**options: Any) -> _core.Allocator:
    return _core.Allocator(
        huge_pages="transparent",
        lock=False,
        register_device=True,
        **options,
    )
