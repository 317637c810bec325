"""What does not change is not written again: counted at the store, over whole training runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memascend.plan.derive import derive
from memascend.plan.request import PlanRequest
from memascend.plan.shapes import from_module

from . import models
from .cases import Case, deepspeed_json
from .workers import Bench

pytestmark = [pytest.mark.deepspeed, pytest.mark.full]

STEPS = 4


def written_bytes_of_a_step(bench: Bench, case: Case) -> tuple[float, int]:
    """Bytes one more step writes, and bytes that lie on the drive in the end."""
    _, written, on_drive = moved_bytes_of_a_step(bench, case)
    return written, on_drive


def moved_bytes_of_a_step(bench: Bench, case: Case) -> tuple[float, float, int]:
    """Bytes that one more step reads and writes, and bytes that lie on the drive in the end."""
    shorter, longer = (
        bench.run(replace(case, steps=steps), "memascend")[0]["ledger"]["drive"]
        for steps in (STEPS, 2 * STEPS)
    )
    read, written = (longer[key] - shorter[key] for key in ("bytes_read", "bytes_written"))
    return read / STEPS, written / STEPS, longer["used_bytes"]


def test_frozen_weights_are_written_once(bench: Bench) -> None:
    # Of what is on the drive less than a fifteenth learns with LoRA.
    written, on_drive = written_bytes_of_a_step(bench, Case(family="lora"))
    assert 0 < written < on_drive / 10


def test_a_skipped_step_writes_gradients_and_nothing_else(bench: Bench) -> None:
    taken, _ = written_bytes_of_a_step(bench, Case(dtype="fp16", scale_power=8))
    skipped, _ = written_bytes_of_a_step(bench, Case(dtype="fp16", scale_power=60))
    # In fp16: a gradient of 2 bytes; then master weight, two moments and parameter: 4 + 8 + 2.
    assert skipped == pytest.approx(taken * 2 / 16, rel=0.02)


@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_a_step_of_muon_moves_what_the_plan_says(bench: Bench, clipping: float) -> None:
    case = Case(optimizer_type="Muon", clipping=clipping)
    read, written, on_drive = moved_bytes_of_a_step(bench, case)
    request = PlanRequest.from_deepspeed(
        deepspeed_json(case, "memascend", "/drive"), has_decay_groups=False
    )
    plan = derive(from_module(models.maker(case.family)()), request=request)
    # Without clipping no update is written.
    assert (plan.updates_bytes > 0, plan.request.applies_updates) == (bool(clipping), not clipping)
    # Forward of so small a model waits for the walk, which hands new parameters over.
    planned_read = sum(plan.read_bytes.values()) - plan.handed_over_bytes
    assert read == pytest.approx(planned_read, rel=0.05)
    assert written == pytest.approx(sum(plan.written_bytes.values()), rel=0.05)
    assert on_drive == pytest.approx(sum(plan.drive.values()), rel=0.05)


def test_a_step_of_muon_during_backward_moves_what_the_plan_says(bench: Bench) -> None:
    """One tile of four, some of which are small, is left, and its updates are moved."""
    case = Case(optimizer_type="Muon", during_backward=True)
    read, written, on_drive = moved_bytes_of_a_step(bench, case)
    request = PlanRequest.from_deepspeed(
        deepspeed_json(case, "memascend", "/drive"), has_decay_groups=False
    )
    plan = derive(from_module(models.maker(case.family)()), request=request)
    assert plan.request.during_backward
    assert read == pytest.approx(sum(plan.read_bytes.values()), rel=0.02)
    assert written == pytest.approx(sum(plan.written_bytes.values()), rel=0.02)
    assert on_drive == pytest.approx(sum(plan.drive.values()), rel=0.05)
