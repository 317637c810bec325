"""Drive space that a step's second values leave for saving the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("deepspeed")

from memascend.deepspeed.optimizer.room import too_little_room
from memascend.plan.derive import derive
from memascend.plan.request import PlanRequest
from memascend.plan.second_values import saving_bytes
from memascend.plan.shapes import ModelShapes, TensorShape

PLAN = derive(
    ModelShapes("m", (TensorShape("layers.0.up", (64, 64), trainable=True),)), request=PlanRequest()
)


@pytest.mark.parametrize(("more_bytes", "lacks"), [(0, False), (-1, True)])
def test_a_run_has_room_to_be_saved(more_bytes: int, lacks: bool) -> None:
    drive = SimpleNamespace(free_bytes=lambda: saving_bytes(PLAN) + more_bytes)
    runtime: Any = SimpleNamespace(plan=PLAN, drive=drive)
    found = too_little_room(runtime)
    assert bool(found) is lacks
    assert ("save the run" in found) is lacks


def test_what_is_not_known_is_no_reason() -> None:
    def lost() -> int:
        raise OSError

    for plan, free_bytes in ((None, lambda: 0), (PLAN, lambda: None), (PLAN, lost)):
        runtime: Any = SimpleNamespace(plan=plan, drive=SimpleNamespace(free_bytes=free_bytes))
        assert too_little_room(runtime) == ""
