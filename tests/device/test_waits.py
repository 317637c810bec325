"""Where the host waits for the device while gradients come: not in the hooks that bring them."""

from __future__ import annotations

import inspect

import pytest

from memascend.transfer.staging import StagingSlots
from tests.device.trials import Trial
from tests.device.waits import (
    device_waits_of_gradients,
    functions_of,
    place_in_memascend,
    waits_per_step,
)
from tests.parity.workers import Bench

#: A slot is free once its copy has passed and the drive has written it: bounded memory.
FULL = ("staging.turn", "staging.take")


def test_a_place_is_told_by_functions_which_outlive_line_numbers() -> None:
    line = inspect.getsourcelines(StagingSlots.take)[1] + 1
    place = f"memascend/transfer/staging.py:{line} < deepspeed/runtime/engine.py:7"
    assert functions_of(place) == ["staging.take"]
    assert place_in_memascend(f"torch/x.py:1 < {place}") == f"memascend/transfer/staging.py:{line}"


@pytest.mark.deepspeed
@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("variant", ["bf16", "parameters on the device"])
def test_at_default_sizes_small_gradients_do_not_wait_for_the_device(
    device_bench: Bench, variant: str, seed: int
) -> None:
    rows = waits_per_step(device_bench, Trial(variant, "no limit"), seed, whole=True)
    assert device_waits_of_gradients(rows) == {}


@pytest.mark.deepspeed
@pytest.mark.full
@pytest.mark.timeout(3600)
def test_where_slots_are_few_the_thread_waits_for_a_free_one_and_no_hook(
    device_bench: Bench,
) -> None:
    trial = Trial("bf16", "slots are reused at once")
    rows = waits_per_step(device_bench, trial, seed=2, whole=True)
    waits = device_waits_of_gradients(rows)
    assert all(place.startswith(FULL) for place in waits)  # of parameters that come in chunks
    assert not any("on_device._wait_for_room" in place for place in waits)
    assert any("on_device._serve_on_stream" in functions_of(place) for _, place, *_ in rows)
