"""Muon with momentum in 8 bits: exact when resumed by as many ranks, else rounded once more.

Not the bits of CPU offload, so values are compared with those of another run of ours, and with the
values that a checkpoint has.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pytest
import torch

from .cases import Case
from .saved import save
from .workers import Bench, Facts, differences

pytestmark = [pytest.mark.deepspeed, pytest.mark.full]

#: Two ranks, which cut matrices, say more than one.
ONE = pytest.param(1, marks=pytest.mark.matrix)
#: Odd shapes: two ranks cut matrices in the middle of a block of codes.
INT8 = Case(family="odd", optimizer_type="Muon", state_dtype="int8", steps=2)
EXACT = dataclasses.replace(INT8, state_dtype="")
#: A code stands for code x abs(code) x scale: the largest two of a block lie 1 - (126 / 127)^2
#: apart, as a part of the largest value. Codes of second moments lie closer.
ROUNDED_PART = (1 - (126 / 127) ** 2) / 2
#: Of fp32 master weights in halves so many are rounded in their last place, where momentum is in
#: codes: a few of those that docs/eight-bits.md expects.
ROUNDED_WEIGHTS = 4 / 131072
#: Scales are fp32.
TOLERANCE = 1e-3
#: The norm of one rounding's errors, by that of the values: docs/eight-bits.md has 1 to 2 %.
ROUNDED_NORM = 0.03


def losses(facts: list[Facts]) -> list[float]:
    return [float.fromhex(loss) for loss in facts[0]["losses"]]


def digest(value: torch.Tensor) -> str:
    return hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()


def digests(values: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: digest(value) for name, value in values.items()}


def in_bf16(values: dict[str, torch.Tensor]) -> dict[str, str]:
    """Digests of values as a run has them whose momentum is bf16, rounded to nearest."""
    return {
        name: digest(value.bfloat16().float() if "momentum" in name else value)
        for name, value in values.items()
    }


def assert_rounded_once(found: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    """Values are as near as one more rounding leaves them.

    The first and last values of a tensor may share a block, and so a scale, with another tensor.
    """
    assert found.keys() == saved.keys()
    largest: dict[str, float] = {}
    for name, value in saved.items():
        state = name.split()[1]
        largest[state] = max(largest.get(state, 0.0), value.abs().max().item())
    moved = set()
    for name, value in saved.items():
        state, error = name.split()[1], found[name] - value
        if state == "fp32":
            places = (found[name].view(torch.int32) - value.view(torch.int32)).abs()
            assert places.max() <= 1, name
            assert places.sum() <= 1 + ROUNDED_WEIGHTS * value.numel(), name
            continue
        assert error.abs().max() <= largest[state] * (ROUNDED_PART + TOLERANCE), name
        assert value.norm() > 0, name
        if value.numel() > 10_000:
            assert error.norm() < ROUNDED_NORM * value.norm(), name
        moved |= {state} if error.any() else set()
    assert "momentum_buffer" in moved, "else no code was made anew"


@pytest.mark.parametrize("world", [ONE, 2])
def test_a_resumed_run_is_the_one_that_was_not_interrupted(bench: Bench, world: int) -> None:
    whole = dataclasses.replace(INT8, world=world, steps=4)
    expected = bench.run(whole, "memascend")
    for is_portable in (True, False):  # without it states are in files alone, decoded
        parts = dataclasses.replace(whole, resume_at=2, is_portable=is_portable)
        assert differences(bench.run(parts, "memascend"), expected) == []
    exact = bench.run(dataclasses.replace(whole, state_dtype=""), "memascend")
    assert losses(expected) == pytest.approx(losses(exact), rel=0.02)
    assert expected[0]["masters"] != exact[0]["masters"]


@pytest.mark.parametrize("world", [ONE, 2])
def test_other_ranks_go_on_from_a_universal_checkpoint(
    bench: Bench, tmp_path: Path, world: int
) -> None:
    found = save(bench, tmp_path / "saved", dataclasses.replace(INT8, world=world), "memascend")
    values = found.values()
    assert digests(values) == without_step(found.states)
    goes_on = found.later(world=3 - world, is_universal=True)
    exact = bench.run(dataclasses.replace(goes_on, state_dtype=""), "memascend")
    assert without_step(exact[0]["loaded"]) == in_bf16(values)

    loads = dataclasses.replace(goes_on, steps=INT8.steps)
    loaded = save(bench, tmp_path / "loaded", loads, "memascend")
    assert_rounded_once(loaded.values(), values)
    later = bench.run(goes_on, "memascend")
    assert losses(later) == pytest.approx(losses(exact), rel=0.02)
    assert later[0]["masters"] != exact[0]["masters"]


@pytest.mark.parametrize("world", [ONE, 2])
def test_momentum_goes_from_8_bits_to_cpu_offload_and_to_bf16_and_back(
    bench: Bench, tmp_path: Path, world: int
) -> None:
    found = save(bench, tmp_path / "saved", dataclasses.replace(INT8, world=world), "memascend")
    values = found.values()
    oracle = bench.run(found.later(), "oracle")
    assert without_step(oracle[0]["loaded"]) == digests(values)
    loads = found.later(steps=INT8.steps, state_dtype="")
    widened = save(bench, tmp_path / "widened", loads, "memascend")
    assert without_step(widened.states) == in_bf16(values)
    later = bench.run(dataclasses.replace(loads, steps=4), "memascend")
    assert losses(later) == losses(oracle)

    exact = save(bench, tmp_path / "exact", dataclasses.replace(EXACT, world=world), "memascend")
    loads = exact.later(steps=INT8.steps, state_dtype="int8")
    narrowed = save(bench, tmp_path / "narrowed", loads, "memascend")
    assert_rounded_once(narrowed.values(), exact.values())


def without_step(states: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in states.items() if name != "step"}
