"""What a step takes of the device's memory, and what becomes of one that does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.device.emulator.build import why_not
from tests.integration.programs import BLOCK, SAVING, retried_config
from tests.support.program import RunProgram

PROGRAM = Path(__file__).with_name("memory_program.py")
LIMIT_COUNT = 8
PEAK_PROGRAM = Path(__file__).with_name("peak_program.py")
STREAMS_PROGRAM = Path(__file__).with_name("streams_program.py")
RELEASED_COUNT = 4
#: In use, gathered ahead of use, and let go without being counted yet.
LIVE_COUNT_MAX = 9
NO_LIMIT = 1 << 40
PARAMETER_BYTES = 512 << 10  # of the program's layers


@pytest.mark.deepspeed
@pytest.mark.full
@pytest.mark.parametrize("more", [{}, SAVING], ids=["", "activations"])
def test_a_step_that_does_not_fit_the_device_can_be_tried_again_with_less(
    tmp_path: Path, run_program: RunProgram, more: dict[str, Any]
) -> None:
    """Wherever memory runs out: the numbers are those of a run with room, no slot is lost."""
    if reason := why_not():
        pytest.skip(reason)
    path = retried_config(tmp_path, BLOCK | more | {"host_memory_limit": "200MiB"})
    undisturbed, *retried = run_program(str(PROGRAM), str(path), str(LIMIT_COUNT))
    assert len(retried) == LIMIT_COUNT
    failed = {one["where"] for one in retried}
    assert any(where.startswith("gather") for where in failed), failed
    assert any(where.endswith("backward") for where in failed), failed
    for one in retried:
        assert one["where"] != "", "nothing failed"
        assert one["numbers"] == undisturbed["numbers"], one["where"]
        assert (one["lost"], one["findings"]) == (0, {}), one["where"]


@pytest.mark.deepspeed
@pytest.mark.full
def test_a_host_ahead_of_a_slow_device_does_not_take_its_memory_for_the_whole_model(
    tmp_path: Path, run_program: RunProgram
) -> None:
    """All parameters are in host memory: nothing but the bound keeps the host."""
    if reason := why_not():
        pytest.skip(reason)
    path = retried_config(tmp_path, BLOCK | {"host_memory_limit": "600MiB"})
    limit = RELEASED_COUNT * PARAMETER_BYTES
    found = run_program(str(PEAK_PROGRAM), str(path), str(limit), str(NO_LIMIT))
    assert found["parameter"] == PARAMETER_BYTES
    bounded, unbounded = found["peaks"]
    for phase in ("forward", "backward"):
        at_most = (RELEASED_COUNT + LIVE_COUNT_MAX) * PARAMETER_BYTES
        assert bounded[phase] <= at_most, phase
        # The device was slow enough to tell.
        assert unbounded[phase] > 1.5 * at_most, phase


@pytest.mark.deepspeed
def test_what_is_read_on_one_stream_may_be_used_on_another(run_program: RunProgram) -> None:
    """Layers side by side on two streams: backward takes on either what it read ahead on one."""
    if reason := why_not():
        pytest.skip(reason)
    found = run_program(str(STREAMS_PROGRAM))
    assert found["read_bytes"] > 0
    assert (found["before"], found["findings"], found["equal"]) == ({}, {}, True)
