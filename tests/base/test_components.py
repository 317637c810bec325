"""The ledger's names: each once, and the plan uses no others."""

from __future__ import annotations

from memascend.base import components
from memascend.plan.derive import PlanRequest, derive
from memascend.plan.shapes import builtin

NAMES = [value for name, value in vars(components).items() if name.isupper()]


def test_every_name_is_there_once() -> None:
    assert NAMES
    assert len(set(NAMES)) == len(NAMES)


def test_the_plan_uses_these_names() -> None:
    request = PlanRequest(verify="reads")
    assert set(derive(builtin("Qwen2.5-7B"), request=request).host) <= set(NAMES)
