"""Notes which slices ran."""

from __future__ import annotations

import pytest

from tests.support.sliced_models import Weights


@pytest.fixture(autouse=True)
def passes() -> list[tuple[str, list[int]]]:
    Weights.passes.clear()
    return Weights.passes
