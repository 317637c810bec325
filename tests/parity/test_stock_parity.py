"""Where DeepSpeed's own NVMe offload gives the bits of its CPU offload, and where it does not.

The right cases validate the bench: two unlike paths through DeepSpeed agree on every bit, so the
oracle is no accident. The wrong ones are why CPU offload is the oracle; a fault
that does not show is skipped and not failed, since some depend on the drive.
"""

from __future__ import annotations

import pytest

from tests.support.parity_cases import case_name, quick

from .cases import Case
from .workers import Bench, differences

pytestmark = pytest.mark.deepspeed

RIGHT = [
    Case(),
    Case(family="qwen", clipping=1.0),
    Case(family="gpt2", dtype="fp16", steps=5),
    Case(family="mixtral", world=2),
    Case(world=2, dtype="fp32", accumulation=4, clipping=1.0),
    Case(world=2, checkpointing="nonreentrant"),
    Case(pipeline=True),
    Case(optimizer="cpu"),
    Case(params="cpu"),
    Case(optimizer="absent", world=2),
]
WRONG = [
    # A slice of a weight is saved for backward; on the CPU accelerator it aliases the swap buffer,
    # which has served another tensor by the time it is read.
    (Case(family="mixtral"), "one rank on CPU: what autograd saved aliases a swap buffer"),
    # Gradients are read straight to their offset in the sub-group; behind a tensor whose bytes are
    # no multiple of the sector that address is unaligned, the read fails, and nobody looks.
    (Case(family="odd"), "unaligned gradient reads fail unnoticed"),
    (Case(family="odd", world=2), "unaligned gradient reads fail unnoticed"),
    # A tensor without a gradient is updated with whatever the swap buffer held.
    (Case(family="unused"), "unused tensors are updated with garbage"),
    (Case(family="unused", world=2), "unused tensors are updated with garbage"),
    (Case(family="alternating"), "unused tensors are updated with garbage"),
]


@pytest.mark.parametrize("case", quick(RIGHT, 0), ids=case_name)
def test_stock_nvme_gives_the_bits_of_cpu_offload(bench: Bench, case: Case) -> None:
    facts = bench.run(case.within_stock(), "stock")
    # The model to export is left out: stock keeps `param.cpu()`, which on the CPU accelerator is no
    # copy but the swap buffer itself, overwritten by the next parameter.
    oracle = [rank | {"consolidated": None} for rank in bench.run(case, "oracle")]
    facts = [rank | {"consolidated": None} for rank in facts]
    assert differences(facts, oracle) == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "fault"), [pytest.param(case, fault, id=case.name) for case, fault in WRONG]
)
def test_stock_nvme_gives_other_bits_than_cpu_offload(bench: Bench, case: Case, fault: str) -> None:
    facts = bench.run(case.within_stock(), "stock")
    oracle = bench.run(case, "oracle")
    if facts[0]["weights"] == oracle[0]["weights"]:
        pytest.skip(f"this drive or this DeepSpeed does not show the fault: {fault}")
    assert facts[0]["start"] == oracle[0]["start"], "both must have begun with the same weights"
