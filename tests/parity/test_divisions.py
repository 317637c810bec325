"""Checkpoints that are loaded by other ranks, in other sub-groups, by whoever else reads them.

What saved is compared tensor by tensor with what was loaded: weights, moments and steps. What
follows is compared with CPU offload that loaded the same state from a universal checkpoint, since
other ranks get other data.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from .cases import SECTIONS, WHOLE, Backend, Case
from .saved import Saved, python, save
from .workers import Bench, differences

pytestmark = pytest.mark.deepspeed

STEPS = 2
SUB_GROUP_OTHER_NUMEL = 700_000
#: By ranks that save. Odd shapes: nothing of them can be divided by two.
SAVERS = {
    1: Case(family="odd", steps=STEPS),
    2: Case(family="odd", steps=STEPS, world=2, dtype="fp16", scale_power=8),
}


@pytest.fixture(scope="module")
def saved(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Saved]:
    """What so many ranks of ours saved, converted by DeepSpeed's own script."""
    known: dict[int, Saved] = {}

    def get(world: int) -> Saved:
        if world not in known:
            folder = tmp_path_factory.mktemp(f"saved{world}")
            found = save(bench, folder, SAVERS[world], "memascend")
            script = ["-m", "deepspeed.checkpoint.ds_to_universal", "--num_extract_workers", 1]
            folders = ["--input_folder", found.tag, "--output_folder", f"{found.tag}_universal"]
            python(*script, "--num_merge_workers", 1, *folders)
            known[world] = found
        return known[world]

    return get


def universal_digests(folder: Path) -> Iterator[tuple[str, str]]:
    for path in (folder / "zero").glob("*/*.pt"):
        values = torch.load(path).numpy().tobytes()
        yield f"{path.parent.name} {path.stem}", hashlib.sha256(values).hexdigest()


def without_step(states: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in states.items() if name != "step"}


@pytest.mark.full
@pytest.mark.parametrize("world", SAVERS)
def test_deepspeeds_script_and_ours_find_every_tensor(
    saved: Callable[[int], Saved], tmp_path: Path, world: int
) -> None:
    found = saved(world)
    expected = without_step(found.states)
    assert len(expected) == 10 * 3
    assert dict(universal_digests(Path(f"{found.tag}_universal"))) == expected
    main = ["-m", "memascend.cli.main", "checkpoint", "to-universal", found.tag]
    python(*main, "--output", tmp_path / "ours")
    assert dict(universal_digests(tmp_path / "ours")) == expected
    assert (tmp_path / "latest_universal").read_text() == "ours"


@pytest.mark.parametrize(
    ("is_universal", "changes"),
    [
        pytest.param(True, {}, id="universal", marks=pytest.mark.full),
        pytest.param(False, {}, id="by name"),
        pytest.param(
            False, {"limit_bytes": 300 << 20}, id="by name, within a limit", marks=pytest.mark.full
        ),
    ],
)
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.full)])
def test_another_number_of_ranks_goes_on_as_cpu_offload(
    bench: Bench,
    saved: Callable[[int], Saved],
    world: int,
    is_universal: bool,
    changes: dict[str, Any],
) -> None:
    found = saved(world)
    case = found.later(world=3 - world)
    oracle = bench.run(dataclasses.replace(case, is_universal=True), "oracle")
    assert oracle[0]["loaded"] == found.states
    case = dataclasses.replace(case, is_universal=is_universal, **changes)
    assert differences(bench.run(case, "memascend"), oracle) == []


@pytest.mark.full
@pytest.mark.parametrize(("world", "sections"), [(1, WHOLE), (2, SECTIONS)])
def test_other_sub_groups_go_on_as_cpu_offload(
    bench: Bench, saved: Callable[[int], Saved], world: int, sections: tuple[str, ...]
) -> None:
    found = saved(world)
    case = found.later(sub_group_numel=SUB_GROUP_OTHER_NUMEL, sections=sections)
    oracle = bench.run(dataclasses.replace(case, is_universal=True), "oracle")
    assert oracle[0]["loaded"] == found.states
    assert differences(bench.run(case, "memascend"), oracle) == []


@pytest.mark.full
@pytest.mark.parametrize(("backend", "world"), [("stock", 1), ("oracle", 2)])
def test_what_stock_saved_is_loaded_by_other_ranks(
    bench: Bench, tmp_path: Path, backend: Backend, world: int
) -> None:
    # Of the odd shapes stock NVMe offload reads gradients wrongly.
    family = "llama" if backend == "stock" else "odd"
    case = Case(family=family, world=world, steps=STEPS, prefetch_numel=0)
    found = save(bench, tmp_path, case, backend)
    loads = found.later(world=3 - world, steps=STEPS)
    assert bench.run(loads, "memascend")[0]["loaded"] == found.states


@pytest.mark.full
def test_without_what_deepspeeds_tools_need_a_checkpoint_is_smaller_and_as_good(
    bench: Bench, saved: Callable[[int], Saved], tmp_path: Path
) -> None:
    portable = saved(1)
    found = save(bench, tmp_path, dataclasses.replace(SAVERS[1], is_portable=False), "memascend")
    assert found.states == portable.states
    nbytes = [
        sum(path.stat().st_size for path in each.tag.rglob("*") if path.is_file())
        for each in (found, portable)
    ]
    numel = sum(path.stat().st_size for path in found.tag.rglob("exp_avg-*")) // 4
    assert nbytes[1] - nbytes[0] == pytest.approx(8 * numel, rel=0.01)
    loads = found.later(world=2, steps=STEPS)
    assert bench.run(loads, "memascend")[0]["loaded"] == found.states


@pytest.mark.full
def test_from_cpu_offload_to_ours_and_back_nothing_is_lost(bench: Bench, tmp_path: Path) -> None:
    case = Case(family="odd", steps=STEPS)
    stock = save(bench, tmp_path / "stock", case, "oracle")
    ours = save(bench, tmp_path / "ours", stock.later(steps=STEPS), "memascend")
    assert ours.states == stock.states
    back = dataclasses.replace(ours.case, load_from=str(ours.folder), save_to="", steps=4)
    uninterrupted = bench.run(stock.later(), "oracle")
    assert differences(bench.run(back, "oracle"), uninterrupted) == []


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2])
def test_from_cpu_offloads_muon_to_ours_and_back_nothing_is_lost(
    bench: Bench, tmp_path: Path, world: int
) -> None:
    """Ours applies updates as they are made: its checkpoints show nothing of that."""
    case = Case(family="odd", world=world, steps=STEPS, optimizer_type="Muon")
    stock = save(bench, tmp_path / "stock", case, "oracle")
    ours = save(bench, tmp_path / "ours", stock.later(), "memascend")
    whole = dataclasses.replace(stock.later(), steps=6)
    back = dataclasses.replace(whole, load_from=str(ours.folder), first_step=4)
    found, expected = bench.run(back, "oracle"), bench.run(whole, "oracle")
    for rank, wanted in zip(found, expected, strict=True):
        assert rank["losses"] == wanted["losses"][2:]
        assert rank["states"] == wanted["states"]


@pytest.mark.full
@pytest.mark.parametrize("is_universal", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_muons_momentum_is_loaded_by_other_ranks(
    bench: Bench, tmp_path: Path, world: int, is_universal: bool
) -> None:
    """A matrix is cut in other places then; other parameters have Adam's moments."""
    case = Case(family="odd", world=world, steps=STEPS, optimizer_type="Muon")
    found = save(bench, tmp_path / "saved", case, "memascend")
    assert any("momentum_buffer" in name for name in found.states)
    loads = found.later(world=3 - world, steps=STEPS, is_universal=is_universal)
    if is_universal:
        found.to_universal()
    assert bench.run(loads, "memascend")[0]["loaded"] == found.states
