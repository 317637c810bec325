"""The promise of tests/parity on a device with streams: the bits of CPU offload, in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.device.trials import (
    ACTIVATION_MODES,
    EVERY_MODE,
    EVERY_VARIANT,
    MUON_MODES,
    REPEATED,
    STEP_MODES,
    Trial,
    chosen,
    parameters,
    trials,
)
from tests.parity.models import maker
from tests.parity.workers import Bench, differences
from tests.support.parity_cases import (
    assert_activations_went,
    assert_memascend_did_it,
    assert_steps_went_behind,
)

pytestmark = pytest.mark.deepspeed


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("trial", parameters())
def test_training_gives_the_bits_of_cpu_offload_whatever_the_delays(
    device_bench: Bench, seeds: list[int], trial: Trial
) -> None:
    case, how = trial.case, trial.how
    oracle = device_bench.run(case, "oracle")
    for seed in seeds:
        facts = device_bench.run(case, how.backend, seed=seed, **how.options)
        assert differences(facts, oracle) == [], seed
        assert [rank["findings"] for rank in facts] == [{}] * case.world, seed
        if how.backend == "memascend" and case.optimizer == "nvme":
            assert_memascend_did_it(case, facts)
            assert_gradients_waited_within_their_room(facts)
            begins_early = case.during_backward and trial.mode != "all stays in memory"
            if trial.mode in MUON_MODES:
                begins_early = begins_early and case.world == 1
                assert all(rank["applies_updates"] != begins_early for rank in facts)
            if case.during_backward != "auto" or not case.limit_bytes:  # else it may not be tried
                assert all((rank["early_tile_count"] > 0) == begins_early for rank in facts)
        if trial.mode in STEP_MODES:
            assert_steps_went_behind(case, facts)
        if trial.mode in ACTIVATION_MODES:
            assert_activations_went(case, facts)


def assert_gradients_waited_within_their_room(facts: list[dict[str, Any]]) -> None:
    for rank in facts:
        row = rank["ledger"]["gradients_on_device"]
        if row is not None and row["planned_bytes"]:
            assert 0 < row["peak_bytes"] <= row["planned_bytes"]
            assert row["live_bytes"] == 0


@pytest.mark.parametrize(("variant", "seed"), [("bf16", 2), ("two ranks", 0)])
def test_a_script_that_gathers_on_a_stream_of_its_own_gets_whole_parameters(
    device_bench: Bench, variant: str, seed: int
) -> None:
    """And so does DeepSpeed, which had asked for them on its stream and waits for that one."""
    case = Trial(variant, "no limit").case
    facts = device_bench.run(case, "memascend", seed=seed, beside=True)
    assert differences(facts, device_bench.run(case, "oracle")) == []
    assert [rank["findings"] for rank in facts] == [{}] * case.world
    assert all(rank["gathered_beside"] > 0 for rank in facts)


def test_gradients_are_read_in_hooks_of_the_host_while_the_device_delivers_others(
    device_bench: Bench,
) -> None:
    """Both threads pass them through the same staging slots."""
    case = Trial("bf16 one micro-step", "large shards have no slot").case
    facts = device_bench.run(case, "memascend", seed=2, looking=True)
    assert differences(facts, device_bench.run(case, "oracle")) == []
    (rank,) = facts
    assert rank["findings"] == {}
    assert_gradients_waited_within_their_room(facts)
    assert rank["ledger"]["gradients_on_device"]["planned_bytes"] > 0
    assert min(rank["host_looks"].values()) > 0, rank["host_looks"]


def test_every_trial_has_a_name_of_its_own() -> None:
    names = [trial.name for trial in trials()]
    assert len(names) == len(set(names))


def test_make_test_all_runs_each_mode_and_each_variant_that_repeats_no_other() -> None:
    assert {trial.variant for trial in chosen()} == {*EVERY_VARIANT} - {*REPEATED}
    assert {*REPEATED} < {*EVERY_VARIANT}
    assert {trial.mode for trial in chosen()} == {*EVERY_MODE}


@pytest.mark.parametrize("ranks", [2, 4])
def test_some_ranks_have_nothing_of_a_tensor(ranks: int) -> None:
    families = {trial.case.family for trial in chosen() if trial.case.world == ranks}
    assert "odd" in families
    with torch.device("meta"):
        assert min(one.numel() for one in maker("odd")().parameters()) < ranks
