"""The emulated device sees the deliberate mistakes of mistakes.py, without any delay but one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.device.mistakes import MISTAKES
from tests.device.trials import MIB, TRAINING
from tests.parity.cases import Case
from tests.parity.workers import Bench, CaseFailed, differences

pytestmark = pytest.mark.deepspeed

#: Few slots, so that one is taken again while copies of it are pending. With two ranks shards are
#: half as large.
FEW_SLOTS_BYTES = {1: 29 * MIB, 2: 20 * MIB}
FEW_SLOTS = replace(TRAINING, limit_bytes=FEW_SLOTS_BYTES[1], steps=1)
#: Large shards, which travel in chunks: one follows another into a slot.
CHUNKS = replace(FEW_SLOTS, limit_bytes=10 * MIB, family="odd", checkpointing="off")
#: Weights go to the device in many small tiles.
WEIGHTS = replace(TRAINING, params="none", limit_bytes=10 * MIB, steps=1)
#: All that forward saves goes to the drive.
SAVING = replace(TRAINING, saved_bytes=0, checkpointing="off", steps=1)
#: The optimizer steps beside backward, and waits for gradients that are copied.
EARLY = replace(TRAINING, during_backward=True, clipping=0.0, steps=4)
CASES = dict.fromkeys(MISTAKES, FEW_SLOTS) | {
    "slot_taken_before_copied_out": CHUNKS,
    "tile_stepped_before_copied": WEIGHTS,
    **{name: SAVING for name in MISTAKES if name.startswith("activation")},
    # Which memory is in use yet depends on the drive, too.
    "activation_read_into_memory_in_use": replace(SAVING, steps=4),
    # Which gathers begin late depends on the drive: one step may show nothing.
    "slot_back_before_gather_copy": replace(FEW_SLOTS, steps=4),
    "gather_event_on_default_stream": replace(FEW_SLOTS, steps=4),
    # Which events are held at once depends on the host's threads: missed once in eight.
    "event_used_again_while_it_is_held": replace(FEW_SLOTS, steps=4),
    "steps_on_device_0": EARLY,
    "gather_on_any_stream": TRAINING,
}

#: With several ranks stock copies what it gathers while the host waits, and so hides these.
HIDDEN_BY_STOCK = ("slot_back_before_gather_copy", "gather_event_on_default_stream")
#: The first rank works on the device that a thread begins with, and one that is alone waits for its
#: copies on any stream.
SEEN_BY_SEVERAL_RANKS = (
    "activations_on_device_0",
    "steps_on_device_0",
    "gather_on_any_stream",
)
#: A script gathers by hand on a stream of its own, too.
BESIDE = ("gather_on_any_stream",)


#: What the host itself computes has no clock: a copy has to be late to show it. So has one that an
#: event marks which another stream records meanwhile.
SEEDS = {"tile_stepped_before_copied": 2, "event_used_again_while_it_is_held": 2}


def on_ranks(case: Case, world: int) -> Case:
    has_few_slots = replace(case, steps=FEW_SLOTS.steps) == FEW_SLOTS
    limit_bytes = FEW_SLOTS_BYTES[world] if has_few_slots else case.limit_bytes
    return replace(case, world=world, limit_bytes=limit_bytes)


def is_noticed(bench: Bench, mistake: str, world: int, **options: Any) -> bool:
    case = on_ranks(CASES[mistake], world)
    oracle = bench.run(case, "oracle")
    try:
        seed = SEEDS.get(mistake, 0)
        beside = mistake in BESIDE
        facts = bench.run(case, "memascend", mistake=mistake, seed=seed, beside=beside, **options)
    except CaseFailed as error:
        # Only what a mistake may lead to; a mistake that cannot be made raises something else.
        return "StoreError" in str(error) or "gave no answer" in str(error)
    return bool(differences(facts, oracle)) or any(rank["findings"] for rank in facts)


@pytest.mark.parametrize(
    ("mistake", "world"),
    [
        *((mistake, 1) for mistake in MISTAKES if mistake not in SEEN_BY_SEVERAL_RANKS),
        *((mistake, 2) for mistake in (*HIDDEN_BY_STOCK, *SEEN_BY_SEVERAL_RANKS)),
        *(
            pytest.param(mistake, 2, marks=[pytest.mark.full, pytest.mark.matrix])
            for mistake in MISTAKES
            if mistake not in (*HIDDEN_BY_STOCK, *SEEN_BY_SEVERAL_RANKS)
        ),
    ],
)
def test_a_mistake_is_noticed(device_bench: Bench, mistake: str, world: int) -> None:
    """Where stock's blocking copies hide a mistake they are made not to block."""
    stock_blocks = world == 1 or mistake not in HIDDEN_BY_STOCK
    assert is_noticed(device_bench, mistake, world, stock_blocks=stock_blocks)


@pytest.mark.parametrize(
    ("case", "world"),
    [
        pytest.param(FEW_SLOTS, 1, id="few slots-1"),
        pytest.param(CHUNKS, 1, id="chunks-1"),
        pytest.param(SAVING, 1, id="activations-1"),
        pytest.param(FEW_SLOTS, 2, id="few slots-2", marks=pytest.mark.full),
        pytest.param(CHUNKS, 2, id="chunks-2", marks=[pytest.mark.full, pytest.mark.matrix]),
        pytest.param(SAVING, 2, id="activations-2", marks=[pytest.mark.full, pytest.mark.matrix]),
    ],
)
def test_without_a_mistake_nothing_is_noticed(device_bench: Bench, case: Case, world: int) -> None:
    """Otherwise the test above proved nothing. memascend's own events are enough."""
    case = on_ranks(case, world)
    facts = device_bench.run(case, "memascend", stock_blocks=world == 1)
    assert differences(facts, device_bench.run(case, "oracle")) == []
    assert [rank["findings"] for rank in facts] == [{}] * world
