"""The fuzz targets, without a fuzzer: what `make fuzz` checks on millions of inputs, on some."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memascend.config import block as config
from tests.fuzz.targets import TARGETS

INPUT_COUNT = 300
KEPT_COUNT = 20


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.CONFIG_VARIABLE, "")  # a target writes to it


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_nearly_right_is_refused_or_right(name: str) -> None:
    target = TARGETS[name]
    rng = random.Random(name)
    inputs = target.seeds()
    for seed in inputs:
        target.check(seed)
    for _ in range(INPUT_COUNT):
        data = target.mutate(rng.choice(inputs), rng)[: target.bytes_max]
        target.check(data)
        inputs = [*target.seeds(), *inputs[-KEPT_COUNT:], data]


@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes_are_refused_or_right(name: str) -> None:
    @settings(max_examples=50, deadline=None, derandomize=True)
    @given(st.binary(max_size=300))
    def check(data: bytes) -> None:
        TARGETS[name].check(data)

    check()
