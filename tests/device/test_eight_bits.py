"""Muon with momentum in 8 bits on a device with streams: one set of bits, whatever the delays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.device.trials import MIB, Trial
from tests.parity.workers import Bench, Facts, differences
from tests.support.parity_cases import assert_memascend_did_it

pytestmark = [pytest.mark.deepspeed, pytest.mark.full]


def losses(facts: list[Facts]) -> list[float]:
    return [float.fromhex(loss) for loss in facts[0]["losses"]]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("variant", ["Muon not clipped, odd", "Muon not clipped, odd, two ranks"])
def test_a_resumed_run_is_the_one_that_was_not_interrupted(
    device_bench: Bench, seeds: list[int], variant: str
) -> None:
    """The first run has no limit and no delays; ranks cut matrices inside blocks of codes."""
    exact = replace(Trial(variant, "all is on the drive").case, steps=4)
    whole = replace(exact, state_dtype="int8")
    expected = device_bench.run(whole, "memascend")
    oracle = device_bench.run(exact, "oracle")
    assert losses(expected) == pytest.approx(losses(oracle), rel=0.02)
    assert expected[0]["masters"] != oracle[0]["masters"]
    for seed in seeds:
        resumed = replace(whole, resume_at=2, limit_bytes=29 * MIB)
        facts = device_bench.run(resumed, "memascend", seed=seed)
        assert differences(facts, expected) == [], seed
        assert [rank["findings"] for rank in facts] == [{}] * whole.world, seed
        assert_memascend_did_it(resumed, facts)
