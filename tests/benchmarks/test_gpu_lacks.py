"""The things that a machine may lack: each is found, and the reason says which."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import gpu_lacks
import gpu_machine
import pytest

CACHED = (gpu_lacks.compiler, gpu_lacks.async_io, gpu_lacks.checkpoint_offload)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    for function in CACHED:
        function.cache_clear()
    yield
    for function in CACHED:
        function.cache_clear()


def test_a_compiler_and_its_headers_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpu_lacks.compiler() == ""
    gpu_lacks.compiler.cache_clear()
    monkeypatch.setattr(gpu_lacks.sysconfig, "get_path", lambda name: str(tmp_path))
    assert str(tmp_path / "Python.h") in gpu_lacks.compiler()
    gpu_lacks.compiler.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "g++" in gpu_lacks.compiler()
    assert gpu_lacks.training() == gpu_lacks.compiler()


def test_packages_that_are_missing_are_named() -> None:
    assert gpu_lacks.packages("json", "torch") == ""
    assert "no_such_package" in gpu_lacks.packages("json", "no_such_package")


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the least of a CUDA toolkit and of libaio that a compiler wants; the path of it."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ on the path")
    for folder in ("include", "lib64", "aio"):
        (tmp_path / folder).mkdir()
    (tmp_path / "include" / "cuda_runtime.h").touch()
    (tmp_path / "aio" / "libaio.h").touch()
    for name, folder in (("cudart", "lib64"), ("cuda", "lib64"), ("aio", "aio")):
        library = tmp_path / folder / f"lib{name}.so"
        subprocess.run(["g++", "-shared", "-x", "c++", "/dev/null", "-o", library], check=True)
    monkeypatch.setenv("CPATH", str(tmp_path / "aio"))
    monkeypatch.setenv("LIBRARY_PATH", str(tmp_path / "aio"))
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", str(tmp_path))
    return tmp_path


def test_async_io_can_be_built_with_the_toolkit_and_libaio(toolkit: Path) -> None:
    assert gpu_lacks.async_io() == ""


@pytest.mark.parametrize(
    ("absent", "reason"),
    [("include/cuda_runtime.h", "cuda_runtime.h"), ("lib64/libcuda.so", "-lcuda")],
)
def test_the_part_that_async_io_lacks_is_named_with_the_fix(
    toolkit: Path, absent: str, reason: str
) -> None:
    (toolkit / absent).unlink()
    found = gpu_lacks.async_io()
    assert reason in found
    assert f"LIBRARY_PATH={toolkit}/lib64/stubs" in found


def test_without_a_toolkit_there_is_no_async_io(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    assert "CUDA_HOME" in gpu_lacks.async_io()


@pytest.mark.parametrize("readable", ["9.0", "8.0;9.0+PTX", "8.6 10.0"])
def test_architectures_that_deepspeed_reads_keep_nobody_from_async_io(
    toolkit: Path, monkeypatch: pytest.MonkeyPatch, readable: str
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", readable)
    assert gpu_lacks.async_io() == ""


@pytest.mark.parametrize("listed", ["9.0a", "8.0;9.0a+PTX"])
def test_an_architecture_that_deepspeed_cannot_read_is_named_with_the_fix(
    toolkit: Path, monkeypatch: pytest.MonkeyPatch, listed: str
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    found = gpu_lacks.async_io()
    assert listed in found
    assert found.endswith("set TORCH_CUDA_ARCH_LIST=9.0")


def test_a_transformers_without_the_switch_for_checkpoints_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def enable(self: object, activation_checkpointing_kwargs: object = None) -> None:
        raise AssertionError

    def enable_now(self: object, offload: bool = False) -> None:
        raise AssertionError

    model = SimpleNamespace(gradient_checkpointing_enable=enable)
    stand_in = SimpleNamespace(PreTrainedModel=model, __version__="5.17.0")  # its import takes long
    monkeypatch.setitem(sys.modules, "transformers", stand_in)
    monkeypatch.setattr(gpu_lacks, "packages", lambda *names: "")
    assert "transformers 5.17.0" in gpu_lacks.checkpoint_offload()
    gpu_lacks.checkpoint_offload.cache_clear()
    model.gradient_checkpointing_enable = enable_now
    assert gpu_lacks.checkpoint_offload() == ""


def test_a_record_states_the_lacks_of_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = gpu_lacks.doctor.Check("io_uring", "note", "refused: Operation not permitted")
    fine = gpu_lacks.doctor.Check("page lock", "ok", "unlimited")
    monkeypatch.setattr(gpu_lacks.doctor, "examine", lambda path: [ring, fine])
    monkeypatch.setattr(gpu_lacks.shutil, "which", lambda tool: None)
    machine = gpu_machine.Machine(0, 0, 1, 1, 1)
    facts = gpu_machine.facts(tmp_path, machine)
    assert set(facts["lacks"]) == {"io_uring", "nvcc", "nvidia-smi"}
    text = gpu_machine.describe(facts)
    assert "io_uring: refused: Operation not permitted." in text
    assert "page lock" not in text
