"""What a training waits for before a module computes: that module's parameters, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.program import RunProgram

PROGRAM = Path(__file__).with_name("gathers_program.py")
LEAVES = Path(__file__).with_name("leaf_program.py")
LAYERS = 12

pytestmark = pytest.mark.deepspeed


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_module_waits_for_the_parameters_or_the_gather_of_another(
    run_program: RunProgram, ranks: int
) -> None:
    """The drive is as fast as the layers compute, so that any other wait would show.

    In another step copies and collectives are as fast, and the drive takes no time.
    """
    found: Any = run_program(str(PROGRAM), ranks=ranks)
    assert len(found) == ranks
    for both in found:
        rank = both["reads"]
        shard_bytes, forward = rank["shard"], rank["forward"]
        assert forward["compute"] == LAYERS * shard_bytes
        assert forward["read"] >= LAYERS * shard_bytes
        if ranks == 1:
            assert forward["read"] > LAYERS * shard_bytes  # and some for backward
        assert forward["needed"] == LAYERS
        # The first is read before anything computes, and then all that computes is beside reads.
        assert forward["passed"] == (LAYERS + 1) * shard_bytes
        for phase in ("forward", "whole"):
            assert rank[phase].get("ahead", 0) == 0
        # The host is two layers ahead of the device: all gathers but the first are beside it.
        forward = both["gathers"]["forward"]
        assert forward["gathers"] == forward["compute"] / shard_bytes == LAYERS
        assert forward["passed"] == (LAYERS + 1) * shard_bytes


def test_leaves_of_several_ranks_give_the_bits_of_cpu_offload(run_program: RunProgram) -> None:
    found: Any = run_program(str(LEAVES), ranks=2)
    for on_cpu, on_drive in found:
        assert on_drive == on_cpu
        assert len(set(on_cpu)) == len(on_cpu) > 2  # it trains
    assert found[0] != found[1]
