"""Every family of models that people train gives the bits of CPU offload, at toy size."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.parity_cases import assert_activations_went, assert_memascend_did_it

from . import families
from .cases import Case
from .models import LIGER
from .workers import Bench, differences

pytestmark = [pytest.mark.deepspeed, pytest.mark.full]


@pytest.mark.parametrize("name", families.SHAPES)
def test_a_tied_head_has_no_weights_of_its_own(name: str) -> None:
    tied, untied = (families.maker(f"{name}-{ending}")() for ending in ("tied", "untied"))
    head = families.VOCABULARY * families.HIDDEN
    assert numel(untied) - numel(tied) >= head


def numel(model: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name in families.PUBLISHED else pytest.mark.matrix)
        for name in families.NAMES
    ],
)
def test_a_family_gives_the_bits_of_cpu_offload(bench: Bench, family: str) -> None:
    case = Case(family=family, clipping=1.0)
    facts = bench.run(case, "memascend")
    expected = bench.run(case, "oracle")
    assert all(math.isfinite(float.fromhex(loss)) for loss in expected[0]["losses"])
    assert differences(facts, expected) == []
    assert_memascend_did_it(case, facts)


@pytest.mark.parametrize("family", families.WITH_LIGER)
def test_with_ligers_loss_a_family_gives_the_bits_of_cpu_offload(bench: Bench, family: str) -> None:
    case = Case(family=f"{LIGER}-{family}", clipping=1.0, saved_bytes=0)
    facts = bench.run(case, "memascend")
    assert differences(facts, bench.run(case, "oracle")) == []
    assert_memascend_did_it(case, facts)
    assert_activations_went(case, facts)
