"""Universal checkpoints: made a tensor at a time, verified, and read by any number of ranks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("deepspeed")

import torch

from memascend.base.units import MIB
from memascend.checkpoint import to_universal as universal_writer
from memascend.checkpoint.universal import open_universal, universal_files, verify_universal
from memascend.cli.main import main
from memascend.errors import CheckpointError
from tests.support.divided_checkpoints import (
    MODEL,
    contents,
    expected,
    model_states,
    optim_states,
    sub_groups,
    values_of,
    wanted,
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
        wants = wanted(sub_groups(MODEL, "d c", "b", "a"), world)
        files = universal_files(folder, wants)
        verify_universal(files, lambda _: None)
        assert len(files) == len(MODEL) * 3
        for rank in range(world):
            source = open_universal(folder, wants, rank=rank, world=world)
            assert contents(source, wants) == expected(values, wants.parameters, rank, world)
            states = source.optimizer_states
            assert {state["step"] for state in states["state"].values()} == {3}
            assert states["param_groups"] == [{"lr": 0.1, "params": [0, 1, 2]}]


def test_sub_groups_count_their_steps_apart(tmp_path: Path) -> None:
    step = torch.tensor(3.0)  # torch's optimizers count in place
    write(tmp_path / "x", values_of(MODEL), GROUPS, world=1, in_files=False, step=step)
    main(["checkpoint", "to-universal", str(tmp_path / "x")])
    source = open_universal(tmp_path / "x_universal", wanted(GROUPS, 1), rank=0, world=1)
    steps = [state["step"] for state in source.optimizer_states["state"].values()]
    steps[0] += 1
    assert steps == [4, 3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "x", values_of(MODEL), GROUPS, world=1, in_files=True)
    main(["checkpoint", "to-universal", str(tmp_path / "x")])
    return tmp_path / "x_universal"


def load(folder: Path) -> None:
    wants = wanted(GROUPS, 2)
    verify_universal(universal_files(folder, wants), lambda _: None)
    open_universal(folder, wants, rank=0, world=2).close()


def flip(folder: Path) -> None:
    path = folder / "zero" / "c" / "exp_avg.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def change(name: str, value: object) -> Callable[[Path], None]:
    return lambda folder: torch.save(value, folder / "zero" / f"{name}.pt")


DAMAGES: list[tuple[Callable[[Path], Any], str]] = [
    (flip, r"c/exp_avg\.pt is damaged: Bad CRC-32"),
    (lambda folder: (folder / "zero/c/fp32.pt").unlink(), r"c/fp32\.pt is missing"),
    (lambda folder: (folder / "zero/c/exp_avg.pt").unlink(), r"c/exp_avg\.pt is missing"),
    (lambda folder: shutil.rmtree(folder / "zero"), "is no universal checkpoint"),
    (lambda folder: (folder / "zero/optimizer_state.pt").unlink(), r"_state\.pt is missing"),
    (change("c/fp32", torch.ones(51)), r"has 51 elements, the model's c has 50"),
    (change("c/fp32", torch.ones(50).half()), r"master weights in torch\.float16"),
    (change("c/exp_avg", torch.ones(50).half()), "exp_avg in several dtypes"),
    (change("c/fp32", {"param": torch.ones(50), "is_expert_param": True}), "no plain tensor"),
    (change("optimizer_state", {"optimizer_state_dict": {}}), "lacks 'param_groups'"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_what_is_wrong_is_named(folder: Path, damage: Callable[[Path], Any], message: str) -> None:
    load(folder)
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_a_bit_turned_anywhere_is_damage_or_does_not_matter(folder: Path) -> None:
    path = folder / "zero" / "b" / "fp32.pt"
    content = path.read_bytes()
    refused = 0
    for offset in range(len(content)):
        path.write_bytes(
            content[:offset] + bytes([content[offset] ^ 1 << offset % 8]) + content[offset + 1 :]
        )
        try:
            verify_universal([path], lambda _: None)
        except CheckpointError:
            refused += 1
    assert refused > len(content) // 4


def test_what_cannot_be_converted_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = folder.with_name("x")

    def refusal(*more: str) -> str:
        assert main(["checkpoint", "to-universal", str(saved), *more]) == 1
        return capsys.readouterr().err

    assert "is there already" in refusal()
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
    monkeypatch.setattr(universal_writer.shutil, "disk_usage", lambda _: full)
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
