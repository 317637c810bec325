"""Universal checkpoints: verified, and read by any number of ranks; what is wrong is named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from memascend.checkpoint.to_universal import write_universal
from memascend.checkpoint.universal import (
    open_universal,
    parameter_reader,
    universal_files,
    verify_universal,
)
from memascend.errors import CheckpointError
from tests.support.divided_checkpoints import (
    MODEL,
    sub_groups,
    target_of,
    values_of,
    write,
)

GROUPS = sub_groups(MODEL, "a b", "c d")


def test_sub_groups_count_their_steps_apart(tmp_path: Path) -> None:
    step = torch.tensor(3.0)  # torch's optimizers count in place
    write(tmp_path / "x", values_of(MODEL), GROUPS, world=1, in_files=False, step=step)
    write_universal(tmp_path / "x", tmp_path / "x_universal")
    source = open_universal(tmp_path / "x_universal", target_of(GROUPS, 1), rank=0, world=1)
    steps = [state["step"] for state in source.optimizer_states["state"].values()]
    steps[0] += 1
    assert steps == [4, 3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "x", values_of(MODEL), GROUPS, world=1, in_files=True)
    write_universal(tmp_path / "x", tmp_path / "x_universal")
    return tmp_path / "x_universal"


def load(folder: Path) -> None:
    target = target_of(GROUPS, 2)
    verify_universal(universal_files(folder, target), lambda _: None)
    open_universal(folder, target, rank=0, world=2).close()


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


def test_a_file_is_mapped_when_it_is_read_and_mapped_again_after_closing(tmp_path: Path) -> None:
    reader = parameter_reader(tmp_path / "a.pt")
    reader.close()  # nothing is open yet, nothing is there yet
    target = torch.empty(4, dtype=torch.uint8)
    for value in (5, 7):
        torch.save(torch.full((3,), value, dtype=torch.uint8), tmp_path / "a.pt")
        for _ in range(2):
            reader.fill(0, target)
            assert target.tolist() == [value] * 3 + [0]
        reader.close()
