"""Conversion to a universal checkpoint: a tensor at a time, exact, and without DeepSpeed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from memascend.base.units import MIB
from memascend.checkpoint import folder as saving_folder
from memascend.checkpoint.universal import open_universal, universal_files, verify_universal
from memascend.cli.main import main
from tests.support.divided_checkpoints import (
    MODEL,
    contents,
    expected,
    model_states,
    optim_states,
    sub_groups,
    target_of,
    values_of,
    write,
)

GROUPS = sub_groups(MODEL, "a b", "c d")
LARGE_NUMEL = 16 * MIB  # 64 MiB of weights, as much of each moment
MEMORY_PROGRAM = """
import resource, sys
from memascend.checkpoint.to_universal import write_universal
from pathlib import Path
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
write_universal(Path(sys.argv[1]), Path(sys.argv[1] + "_universal"))
before = peak()
write_universal(Path(sys.argv[2]), Path(sys.argv[2] + "_universal"))
print(peak() - before)
"""
WITHOUT_DEEPSPEED = """
import sys
class Blocker:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "deepspeed":
            raise ImportError(f"{name} is blocked by this test")
sys.meta_path.insert(0, Blocker())
from memascend.cli.main import main
sys.exit(main(["checkpoint", "to-universal", sys.argv[1]]))
"""


def read(folder: Path, state: str) -> Any:
    return torch.load(folder / "zero" / f"{state}.pt", weights_only=False)


@pytest.mark.parametrize("in_files", [True, False])
def test_any_number_of_ranks_reads_what_was_converted(tmp_path: Path, in_files: bool) -> None:
    values = values_of(MODEL)
    write(tmp_path / "x", values, GROUPS, world=2, in_files=in_files)
    assert main(["checkpoint", "to-universal", str(tmp_path / "x")]) == 0
    folder = tmp_path / "x_universal"
    assert (tmp_path / "latest_universal").read_text() == folder.name
    assert {path.name for path in tmp_path.iterdir()} == {"x", folder.name, "latest_universal"}
    assert (folder / model_states(folder, 0).name).is_file()
    for (name, state), value in values.items():
        assert torch.equal(read(folder, f"{name}/{state or 'fp32'}"), value)
    for world in (1, 3):
        target = target_of(sub_groups(MODEL, "d c", "b", "a"), world)
        files = universal_files(folder, target)
        verify_universal(files, lambda _: None)
        assert len(files) == len(MODEL) * 3
        for rank in range(world):
            source = open_universal(folder, target, rank=rank, world=world)
            assert contents(source, target) == expected(values, target.parameters, rank, world)
            states = source.optimizer_states
            assert {state["step"] for state in states["state"].values()} == {3}
            assert states["param_groups"] == [{"lr": 0.1, "params": [0, 1, 2]}]


@pytest.mark.parametrize("in_files", [True, False])
def test_states_in_bf16_become_fp32(tmp_path: Path, in_files: bool) -> None:
    values = {key: value.bfloat16().float() for key, value in values_of(MODEL).items()}
    bf16 = {"in_files": in_files, "state_dtype": torch.bfloat16}
    write(tmp_path / "x", values, GROUPS, world=2, **bf16)
    assert main(["checkpoint", "to-universal", str(tmp_path / "x")]) == 0
    for (name, state), value in values.items():
        found = read(tmp_path / "x_universal", f"{name}/{state or 'fp32'}")
        assert found.dtype == torch.float32
        assert torch.equal(found, value)


@pytest.mark.parametrize("in_files", [True, False])
def test_no_part_of_it_imports_deepspeed(tmp_path: Path, in_files: bool) -> None:
    write(tmp_path / "x", values_of(MODEL), GROUPS, world=2, in_files=in_files)
    command = [sys.executable, "-c", WITHOUT_DEEPSPEED, str(tmp_path / "x")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "x_universal" / "zero" / "a" / "fp32.pt").is_file()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "x", values_of(MODEL), GROUPS, world=1, in_files=True)
    main(["checkpoint", "to-universal", str(tmp_path / "x")])
    return tmp_path / "x_universal"


def test_what_cannot_be_converted_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = folder.with_name("x")

    def refusal(*more: str) -> str:
        assert main(["checkpoint", "to-universal", str(saved), *more]) == 1
        return capsys.readouterr().err

    assert "exists already" in refusal()
    shutil.rmtree(folder)
    path = next(saved.glob("offloaded_tensors/*/*"))
    content = path.read_bytes()
    path.write_bytes(b"x" + content[1:])
    assert f"{path.name} is damaged" in refusal()
    path.write_bytes(content)
    next(saved.glob("memascend-rank*")).unlink()
    assert "stock DeepSpeed's NVMe offload" in refusal()
    optim_states(saved, 0).unlink()
    assert "optim_states.pt is missing" in refusal()
    assert not list(saved.parent.glob("*universal/")), "nothing half-made is left"


def test_a_full_drive_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "x", values_of(MODEL), GROUPS, world=1, in_files=True)
    full = SimpleNamespace(free=0)
    monkeypatch.setattr(saving_folder.shutil, "disk_usage", lambda _: full)
    assert main(["checkpoint", "to-universal", str(tmp_path / "x")]) == 1
    message = capsys.readouterr().err
    assert "0 are free" in message
    assert message.count("Likely cause") == 1


@pytest.mark.full
@pytest.mark.parametrize("in_files", [True, False])
def test_converting_takes_no_memory_for_tensors(tmp_path: Path, in_files: bool) -> None:
    for name, numel in (("small", 4096), ("large", LARGE_NUMEL)):
        groups = sub_groups({"a": numel}, "a")
        write(tmp_path / name, values_of({"a": numel}), groups, world=2, in_files=in_files)
    command = [
        sys.executable,
        "-c",
        MEMORY_PROGRAM,
        str(tmp_path / "small"),
        str(tmp_path / "large"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) < 6 * LARGE_NUMEL  # half of what was converted
