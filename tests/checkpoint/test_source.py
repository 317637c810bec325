"""Finding a checkpoint's tensors: by the manifest, by stock's names, in optim_states.pt."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from memascend.checkpoint.files import TensorReader
from memascend.checkpoint.manifest import Manifest, SubGroupEntry, TensorEntry
from memascend.checkpoint.source import (
    LoadedTensor,
    RankFiles,
    TargetOptimizer,
    check_folder,
    counted,
    open_source,
)
from memascend.errors import CheckpointError

NUMELS = [300, 7]


def states(masters: list[Any], moments: list[dict[str, Any]]) -> dict[str, Any]:
    groups = [{"lr": 0.1, "params": [0, 1]}]
    return {
        "optimizer_state_dict": {
            "partition_count": 1,
            "fp32_flat_groups": masters,
            "optimizer_state_dict": {"state": dict(enumerate(moments)), "param_groups": groups},
        }
    }


def part(folder: Path) -> RankFiles:
    return RankFiles(folder, 0, world=1, states=folder / "optim_states.pt", manifest=None)


def target_of(names: list[str]) -> TargetOptimizer:
    return TargetOptimizer(names, NUMELS, group_count=1, kind="Adam", master_dtype=torch.float32)


def contents(source: Any) -> dict[tuple[int, str | None], list[float]]:
    found = {}
    for tensor in source.tensors:
        target = torch.empty(NUMELS[tensor.sub_group] * 4, dtype=torch.uint8)
        tensor.reader.fill(0, target)
        found[tensor.sub_group, tensor.state] = target.view(torch.float32).tolist()
    source.close()
    return found


def save_as_stock(folder: Path) -> dict[tuple[int, str | None], list[float]]:
    """The first sub-group in files, the second, being small, in optim_states.pt."""
    tensors = folder / "offloaded_tensors" / "rank00"
    tensors.mkdir(parents=True)
    expected: dict[tuple[int, str | None], list[float]] = {}
    small = [torch.randn(NUMELS[1]) for _ in range(3)]
    for state, value in zip((None, "exp_avg", "exp_avg_sq"), small, strict=True):
        large = torch.randn(NUMELS[0])
        name = f"{state}-10_14" if state else "10_14"
        padded = torch.cat([large, torch.zeros(84)])  # stock rounds up
        (tensors / f"{name}.tensor.swp").write_bytes(padded.numpy().tobytes())
        (tensors / f"10_14_gradient_0_{large.numel()}.tensor.swp").touch()
        expected |= {(0, state): large.tolist(), (1, state): value.tolist()}
    empty = torch.empty(0)
    moments = [
        {"step": 3, "exp_avg": empty, "exp_avg_sq": empty},
        {"step": 3, "exp_avg": small[1], "exp_avg_sq": small[2]},
    ]
    torch.save(states([empty, small[0]], moments), folder / "optim_states.pt")
    return expected


@pytest.mark.parametrize("shift", [0, 25, -10])
def test_stocks_files_are_found_though_ids_are_others(tmp_path: Path, shift: int) -> None:
    expected = save_as_stock(tmp_path)
    names = [f"{10 + shift}_{14 + shift}", f"{15 + shift}_{15 + shift}"]
    source = open_source(part(tmp_path), target_of(names))
    assert contents(source) == expected
    assert source.optimizer_states["state"][0]["step"] == 3
    assert source.optimizer_states["state"][0]["exp_avg"].numel() == 0


def test_files_of_another_model_are_refused(tmp_path: Path) -> None:
    save_as_stock(tmp_path)
    with pytest.raises(CheckpointError, match="files of other sub-groups: 10_14"):
        open_source(part(tmp_path), target_of(["10_13", "14_15"]))


@pytest.mark.parametrize("name", ["10_14", "exp_avg-10_14"])
def test_a_file_of_stocks_that_is_missing_is_named(tmp_path: Path, name: str) -> None:
    save_as_stock(tmp_path)
    path = tmp_path / "offloaded_tensors" / "rank00" / f"{name}.tensor.swp"
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{name}.*is missing|other sub-groups"):
        open_source(part(tmp_path), target_of(["10_14", "15_15"]))


def test_all_of_cpu_offloads_checkpoint_is_in_one_file(tmp_path: Path) -> None:
    values = [torch.randn(count) for count in NUMELS]
    moments = [{"step": torch.tensor(2.0), "exp_avg": value * 2} for value in values]
    torch.save(states(values, moments), tmp_path / "optim_states.pt")
    source = open_source(part(tmp_path), target_of(["0_3", "4_4"]))
    found = contents(source)
    for sub_group, value in enumerate(values):
        assert found[sub_group, None] == value.tolist()
        assert found[sub_group, "exp_avg"] == (value * 2).tolist()
    assert source.optimizer_states["state"][1]["step"] == torch.tensor(2.0)


def test_a_file_that_torch_cannot_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "optim_states.pt").write_bytes(b"PK no")
    with pytest.raises(CheckpointError, match=r"optim_states\.pt cannot be read"):
        open_source(part(tmp_path), target_of(["0_3", "4_4"]))


def test_a_checkpoint_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckpointError, match=r"no checkpoint .*missing.* has: other"):
        check_folder(tmp_path / "missing")


def test_a_tensor_that_is_read_counts_its_bytes() -> None:
    value = torch.arange(8, dtype=torch.float32)
    counts: list[int] = []
    tensor = LoadedTensor(0, None, torch.float32, TensorReader(lambda: value))
    reader = counted(tensor, counts.append).reader
    target = torch.zeros(4, dtype=torch.float32)
    reader.fill(16, target.view(torch.uint8))
    reader.close()
    assert counts == [16]
    assert torch.equal(target, value[4:])


@pytest.mark.parametrize("kept", [torch.int8, torch.uint8, torch.bfloat16])
def test_a_file_has_the_dtype_that_the_manifest_states(tmp_path: Path, kept: torch.dtype) -> None:
    """A placeholder in DeepSpeed's file has the dtype in which the run kept the state."""
    values = [torch.randn(count) for count in NUMELS]
    moments = [{"step": 3, "exp_avg": torch.empty(0, dtype=kept)} for _ in values]
    torch.save(states([torch.empty(0)] * 2, moments), tmp_path / "optim_states.pt")
    tensors = []
    for number, value in enumerate(values):
        for state, content in ((None, value), ("exp_avg", 2 * value)):
            file = f"{state}-{number}"
            (tmp_path / file).write_bytes(content.numpy().tobytes())
            entry = {"sub_group": number, "state": state, "dtype": "float32", "file": file}
            tensors.append(TensorEntry(**entry, numel=value.numel()))
    manifest = Manifest(
        memascend="0",
        rank=0,
        world=1,
        global_step=3,
        optimizer="Adam",
        optimizer_step=3,
        sub_groups=tuple(SubGroupEntry(numel=value.numel(), name="") for value in values),
        tensors=tuple(tensors),
        files=(),
    )
    source = open_source(
        dataclasses.replace(part(tmp_path), manifest=manifest), target_of([""] * 2)
    )
    assert {tensor.dtype for tensor in source.tensors} == {torch.float32}
    found = contents(source)
    for number, value in enumerate(values):
        assert found[number, None] == value.tolist()
        assert found[number, "exp_avg"] == (2 * value).tolist()
