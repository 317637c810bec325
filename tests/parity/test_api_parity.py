"""What scripts read and change in the middle of training is what CPU offload would show and do.

Values of safe_get_*, the effect of safe_set_* and of vectorized updates on every later step, norms,
and the layout of the optimizer's state dict. accessors.py says what is read and changed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.parity_cases import assert_memascend_did_it, case_name, quick

from .cases import SECTIONS, Case
from .matrix import LIMIT_SMALL_BYTES
from .workers import Bench, differences

pytestmark = pytest.mark.deepspeed

CHANGED = Case(accessors="change", steps=4)
WITHOUT_STREAMS = tuple(name for name in SECTIONS if not name.startswith("streaming."))
# The embedding spans four tiles, and the vectors are small. In "odd" a tensor has three elements,
# and with two ranks the last shards of three tensors are padded.
CASES = [
    CHANGED,
    replace(CHANGED, world=2),
    replace(CHANGED, family="odd"),
    replace(CHANGED, family="odd", world=2, clipping=1.0),
    replace(CHANGED, dtype="fp16", scale_power=8, accumulation=2, clipping=0.5),
    replace(CHANGED, world=2, params="none", gradients_in_fp32=True, accumulation=2),
    replace(CHANGED, family="qwen", modify_weights=True, limit_bytes=LIMIT_SMALL_BYTES),
    replace(CHANGED, dtype="fp32", optimizer_type="TorchAdamW"),
    replace(CHANGED, family="unused", world=2, sections=(*WITHOUT_STREAMS, "streaming.gradients")),
    replace(CHANGED, family="unused", sections=(*WITHOUT_STREAMS, "streaming.optimizer")),
    replace(CHANGED, world=2, sections=WITHOUT_STREAMS),
]


@pytest.mark.parametrize("case", quick(CASES, 0), ids=case_name)
def test_values_read_and_changed_are_those_of_cpu_offload(bench: Bench, case: Case) -> None:
    facts = bench.run(case, "memascend")
    assert differences(facts, bench.run(case, "oracle")) == []
    assert_memascend_did_it(case, facts)


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2])
def test_reading_leaves_no_trace(bench: Bench, world: int) -> None:
    read = bench.run(Case(accessors="read", steps=4, world=world), "memascend")
    assert differences(read, bench.run(Case(steps=4, world=world), "oracle")) == []


def test_changes_are_noticed(bench: Bench) -> None:
    """The comparison itself can fail."""
    changed = bench.run(CHANGED, "oracle")
    assert differences(changed, bench.run(Case(steps=4), "oracle")) != []


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2])
def test_the_state_dict_has_the_keys_and_shapes_of_stock_nvme(bench: Bench, world: int) -> None:
    case = Case(accessors="read", steps=4, world=world)
    ours, stock = bench.run(case, "memascend"), bench.run(case.within_stock(), "stock")
    for rank, expected in zip(ours, stock, strict=True):
        assert paths(rank["state_dict"]) == paths(expected["state_dict"])


def paths(layout: Any, path: str = "") -> dict[str, str]:
    """Every leaf of a state dict's layout by its path."""
    if not isinstance(layout, dict | list):
        return {path: layout}
    items = layout.items() if isinstance(layout, dict) else enumerate(layout)
    found: dict[str, str] = {}
    for key, value in items:
        found |= paths(value, f"{path}.{key}")
    return found
