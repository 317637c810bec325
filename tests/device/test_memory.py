"""A step that does not fit the device is tried again with a smaller batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device.emulator.build import why_not
from tests.integration.programs import BLOCK, retried_config
from tests.support.program import RunProgram

PROGRAM = Path(__file__).with_name("memory_program.py")
LIMIT_COUNT = 8


@pytest.mark.deepspeed
@pytest.mark.full
def test_a_step_that_does_not_fit_the_device_can_be_tried_again_with_less(
    tmp_path: Path, run_program: RunProgram
) -> None:
    """Wherever memory runs out: the numbers are those of a run with room, no slot is lost."""
    if reason := why_not():
        pytest.skip(reason)
    path = retried_config(tmp_path, BLOCK | {"host_memory_limit": "200MiB"})
    undisturbed, *retried = run_program(str(PROGRAM), str(path), str(LIMIT_COUNT))
    assert len(retried) == LIMIT_COUNT
    failed = {one["where"] for one in retried}
    assert any(where.startswith("gather") for where in failed), failed
    assert any(where.endswith("backward") for where in failed), failed
    for one in retried:
        assert one["where"] != "", "nothing failed"
        assert one["numbers"] == undisturbed["numbers"], one["where"]
        assert (one["lost"], one["findings"]) == (0, {}), one["where"]
