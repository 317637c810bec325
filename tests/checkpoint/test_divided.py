"""Checkpoints that are put together anew by name, and those that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from memascend.checkpoint.divided import SavedLayout, open_divided, read_parameters
from memascend.errors import CheckpointError
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

TWO_GROUPS = [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.5, "params": [2]}]


@pytest.mark.parametrize("in_files", [True, False])
@pytest.mark.parametrize(("saved_world", "world"), [(1, 3), (3, 1), (2, 3), (2, 2)])
def test_every_rank_finds_its_own(
    tmp_path: Path, saved_world: int, world: int, in_files: bool
) -> None:
    values = values_of(MODEL)
    groups = sub_groups(MODEL, "a b", "c d")
    saved = write(tmp_path / "x", values, groups, world=saved_world, in_files=in_files)
    others = sub_groups(MODEL, "d", "b c a")
    for rank in range(world):
        target = target_of(others, world)
        source = open_divided(saved, target, rank=rank, world=world)
        assert contents(source, target) == expected(values, others, rank, world)
        assert [state["step"] for state in source.optimizer_states["state"].values()] == [3, 3]


def test_states_in_bf16_are_found_as_they_are(tmp_path: Path) -> None:
    values = {key: value.bfloat16().float() for key, value in values_of(MODEL).items()}
    groups = sub_groups(MODEL, "a b", "c d")
    saved = write(
        tmp_path / "x", values, groups, world=2, in_files=True, state_dtype=torch.bfloat16
    )
    others = sub_groups(MODEL, "d", "b c a")
    for rank in range(3):
        target = target_of(others, 3)
        source = open_divided(saved, target, rank=rank, world=3)
        dtypes = {tensor.state: tensor.dtype for tensor in source.tensors}
        assert dtypes == {
            None: torch.float32,
            "exp_avg": torch.bfloat16,
            "exp_avg_sq": torch.bfloat16,
        }
        assert contents(source, target) == expected(values, others, rank, 3)


def test_parameter_groups_keep_their_settings(tmp_path: Path) -> None:
    values = values_of(MODEL)
    groups = sub_groups(MODEL, "a", "b", "c d")
    saved = write(tmp_path / "x", values, groups, world=2, in_files=True, param_groups=TWO_GROUPS)
    target = target_of(sub_groups(MODEL, "a b", "c", "d"), 1, param_groups=[0, 1, 1])
    source = open_divided(saved, target, rank=0, world=1)
    assert source.optimizer_states["param_groups"] == [
        {"lr": 0.1, "params": [0]},
        {"lr": 0.5, "params": [1, 2]},
    ]
    with pytest.raises(CheckpointError, match=r"2 parameter groups with 3 .* has 1 with 3"):
        open_divided(saved, target_of(groups, 1), rank=0, world=1)


def test_sub_groups_made_of_one_count_their_steps_apart(tmp_path: Path) -> None:
    groups = sub_groups(MODEL, "a b c d")
    step = torch.tensor(3.0)  # torch's optimizers count in place
    saved = write(tmp_path / "x", values_of(MODEL), groups, world=1, in_files=False, step=step)
    target = target_of(sub_groups(MODEL, "a b", "c d"), 1)
    source = open_divided(saved, target, rank=0, world=1)
    steps = [state["step"] for state in source.optimizer_states["state"].values()]
    steps[0] += 1
    assert steps == [4, 3]


def test_which_parameters_a_sub_group_had_is_read_from_model_states(tmp_path: Path) -> None:
    groups = sub_groups(MODEL, "c", "a b")
    write(tmp_path / "x", values_of(MODEL), groups, world=1, in_files=False)
    found = read_parameters(model_states(tmp_path / "x", 0))
    assert found is not None
    assert [list(group) for group in found] == groups
    torch.save({}, tmp_path / "none.pt")
    assert read_parameters(tmp_path / "none.pt") is None
    with pytest.raises(CheckpointError, match="is missing"):
        read_parameters(tmp_path / "missing.pt")
    (tmp_path / "damaged.pt").write_bytes(b"PK no")
    with pytest.raises(CheckpointError, match=r"damaged\.pt cannot be read"):
        read_parameters(tmp_path / "damaged.pt")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"a": 103, "b": 1, "c": 50, "e": 2}, "missing in the checkpoint: e; .*model: d"),
        ({"a": 103, "b": 1, "c": 51, "d": 2}, "of another size: c"),
    ],
)
def test_another_model_is_refused_by_names(
    tmp_path: Path, other: dict[str, int], message: str
) -> None:
    groups = sub_groups(MODEL, "a b c d")
    saved = write(tmp_path / "x", values_of(MODEL), groups, world=1, in_files=False)
    target = target_of(sub_groups(other, " ".join(other)), 2)
    with pytest.raises(CheckpointError, match=message):
        open_divided(saved, target, rank=0, world=2)


def change_states(saved: SavedLayout, sub_group: int, changes: dict[str, Any]) -> None:
    path = optim_states(saved.ranks[0].folder, 0)
    content = torch.load(path, weights_only=False)
    content["optimizer_state_dict"]["optimizer_state_dict"]["state"][sub_group] |= changes
    torch.save(content, path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 4}, r"sub-groups with \[\{'step': 3\}, \{'step': 4\}\]"),
        ({"rows": torch.ones(5)}, r"'rows' of shape \(5,\)"),
        ({"extra": torch.ones(52)}, "sub-groups with states"),
    ],
)
def test_what_cannot_be_divided_is_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    groups = sub_groups(MODEL, "a b", "c d")
    saved = write(tmp_path / "x", values_of(MODEL), groups, world=1, in_files=False)
    change_states(saved, 1, changes)
    with pytest.raises(CheckpointError, match=f"{message}.* cannot be divided anew"):
        open_divided(saved, target_of(sub_groups(MODEL, "a b c d"), 2), rank=0, world=2)


def test_a_rank_of_padding_alone_has_states_too(tmp_path: Path) -> None:
    values = values_of({"a": 1})
    groups = sub_groups({"a": 1}, "a")
    saved = write(tmp_path / "x", values, groups, world=1, in_files=True)
    target = target_of(groups, 2)
    source = open_divided(saved, target, rank=1, world=2)
    assert contents(source, target) == {(0, s): [0.0] for s in (None, "exp_avg", "exp_avg_sq")}


def test_a_tensor_that_is_missing_on_another_rank_is_named(tmp_path: Path) -> None:
    groups = sub_groups(MODEL, "a b", "c d")
    saved = write(tmp_path / "x", values_of(MODEL), groups, world=2, in_files=False)
    path = optim_states(tmp_path / "x", 1)
    content = torch.load(path, weights_only=False)
    content["optimizer_state_dict"]["fp32_flat_groups"][1] = torch.empty(0)
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=r"rank01/.*tensor\.swp is missing"):
        open_divided(saved, target_of(groups, 1), rank=0, world=1)
