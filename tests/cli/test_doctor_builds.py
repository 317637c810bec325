"""What DeepSpeed builds by itself and `memascend doctor` looks for, and folders it cannot use."""

from __future__ import annotations

import errno
import importlib
from pathlib import Path
from typing import Any

import pytest

from memascend.cli import doctor
from memascend.config.volumes import VolumeConfig


@pytest.mark.parametrize("header", ["Python.h", "other.h"])
@pytest.mark.parametrize("compiler", ["g++", None])
@pytest.mark.parametrize("library", ["libaio.so.1", None])
def test_what_deepspeed_builds_needs_a_compiler_headers_and_for_its_own_io_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Any, compiler: Any, header: str
) -> None:
    (tmp_path / "libaio.h").touch()
    (tmp_path / header).touch()
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(doctor.ctypes.util, "find_library", lambda name: library)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: compiler)
    assert (doctor._libaio().state == "ok") == (None not in (library, compiler))
    operators = doctor._compiler()
    assert ("a C++ compiler" in operators.found) == (compiler is None)
    assert ("Python's headers" in operators.found) == (header == "other.h")
    assert (operators.state == "ok") == (compiler is not None and header == "Python.h")


@pytest.mark.parametrize(
    ("cuda", "home", "is_built_without", "is_missing"),
    [
        ("12.8", None, False, True),
        ("12.8", None, True, False),
        ("12.8", "/usr/local/cuda", False, False),
        (None, None, False, False),
    ],
)
def test_an_older_deepspeed_beside_a_gpu_needs_the_cuda_toolkit(
    monkeypatch: pytest.MonkeyPatch,
    cuda: str | None,
    home: str | None,
    is_built_without: bool,
    is_missing: bool,
) -> None:
    torch = pytest.importorskip("torch")
    cpp_extension = importlib.import_module("torch.utils.cpp_extension")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", home)
    monkeypatch.setattr(doctor, "is_able", lambda ability: is_built_without)
    found = doctor._compiler()
    assert ("the CUDA toolkit" in found.found) == is_missing
    assert ("CUDA_HOME" in found.fix) == is_missing


def test_a_folder_that_may_not_be_written_or_entered_is_a_problem_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    assert doctor._direct_io(tmp_path).fix == "choose a folder that you may write"
    long = VolumeConfig(path="x" * 300)  # is_dir() raises, as of one that may not be entered
    assert doctor.examine([long])[-1].name == "path"
