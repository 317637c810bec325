"""What does not change is not written again: counted at the store, over whole training runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .cases import Case
from .workers import Bench

pytestmark = [pytest.mark.deepspeed, pytest.mark.full]

STEPS = 4


def written_bytes_of_a_step(bench: Bench, case: Case) -> tuple[float, int]:
    """Bytes one more step writes, and bytes that lie on the drive in the end."""
    shorter, longer = (
        bench.run(replace(case, steps=steps), "memascend")[0]["ledger"]["drive"]
        for steps in (STEPS, 2 * STEPS)
    )
    written = longer["bytes_written"] - shorter["bytes_written"]
    return written / STEPS, longer["used_bytes"]


def test_frozen_weights_are_written_once(bench: Bench) -> None:
    # Of what is on the drive less than a fifteenth learns with LoRA.
    written, on_drive = written_bytes_of_a_step(bench, Case(family="lora"))
    assert 0 < written < on_drive / 10


def test_a_skipped_step_writes_gradients_and_nothing_else(bench: Bench) -> None:
    taken, _ = written_bytes_of_a_step(bench, Case(dtype="fp16", scale_power=8))
    skipped, _ = written_bytes_of_a_step(bench, Case(dtype="fp16", scale_power=60))
    # In fp16: a gradient of 2 bytes; then master weight, two moments and parameter: 4 + 8 + 2.
    assert skipped == pytest.approx(taken * 2 / 16, rel=0.02)
