"""One pass: a batch in slices gives the bits that as many micro-steps give with CPU offload."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.support.parity_cases import assert_memascend_did_it, case_name, quick

from .cases import Case
from .workers import Bench, Facts, differences

pytestmark = pytest.mark.deepspeed

PLAIN = Case(family="llama", labelled=True, slices=4, clipping=1.0, checkpointing="nonreentrant")


def exact_cases() -> list[Case]:
    """Those in which nothing is added up in another order."""
    return [
        PLAIN,
        replace(PLAIN, slices=8, during_backward=True, clipping=0.0, steps=4),
        replace(PLAIN, family="mixtral", slices=2, saved_bytes=0),
        replace(PLAIN, saved_bytes=0, during_backward=True, clipping=0.0, limit_bytes=24 << 20),
        replace(PLAIN, family="qwen3-untied", checkpointing="reentrant"),
        replace(PLAIN, family="gemma-untied", saved_bytes=0),
        replace(PLAIN, family="phi-untied", repeats=True),
        replace(PLAIN, family="phi3-untied", during_backward=True, clipping=0.0),
        replace(PLAIN, family="qwen2_moe-untied", slices=2, checkpointing="reentrant"),
        replace(PLAIN, gradients_in_fp32=True),
        replace(PLAIN, dtype="fp16", scale_power=12, repeats=True),
        replace(PLAIN, limit_bytes=24 << 20, steps=6, resume_at=3),
        replace(PLAIN, checkpointing="deepspeed"),
        replace(PLAIN, family="qwen3_moe-untied", limit_bytes=24 << 20, repeats=True),
        replace(PLAIN, zero_init=False, accessors="change", repeats=True),
        replace(PLAIN, by_slice=True, world=2),
        replace(PLAIN, by_slice=True, world=2, gradients_in_fp32=True, family="mixtral"),
        replace(
            PLAIN, by_slice=True, world=2, dtype="fp16", scale_power=12, saved_bytes=0, repeats=True
        ),
        replace(PLAIN, by_slice=True, during_backward=True, clipping=0.0, steps=4, world=2),
        replace(PLAIN, optimizer_type="Muon", limit_bytes=48 << 20),
        replace(PLAIN, optimizer_type="Muon", family="mixtral", slices=2, saved_bytes=0),
    ]


def close_cases() -> list[Case]:
    """Those in which gradients of slices meet others in another order than those of micro-steps."""
    cases = [
        replace(PLAIN, world=2),  # the ranks' gradients
        replace(PLAIN, family="qwen2-tied"),  # the embedding's
        replace(PLAIN, compiled="aot_eager", repeats=True),  # each slice is a graph of its own
        replace(PLAIN, family="gpt2", repeats=True),  # learned positions: those of all sequences
        replace(PLAIN, accumulation=2, slices=2),  # those of the first micro-step
        replace(PLAIN, family="mixtral", world=2, saved_bytes=0, limit_bytes=24 << 20),
        replace(
            PLAIN,
            world=2,
            dtype="fp16",
            scale_power=12,
            during_backward=True,
            clipping=0.0,
            repeats=True,
        ),
    ]
    return [replace(case, tells_masters=True) for case in cases]


@pytest.mark.parametrize("case", quick(exact_cases(), 0, 1, 2), ids=case_name)
def test_slices_give_the_bits_of_micro_steps(bench: Bench, case: Case) -> None:
    facts, oracle = bench.run(case, "memascend"), bench.run(case, "oracle")
    assert differences(facts, oracle) == []
    for rank, expected in zip(facts, oracle, strict=True):
        assert_losses_are_close(rank, expected, rel=1e-6)
        assert not [one for one in rank["warnings"] if "whole batch" in one]
    assert_memascend_did_it(case, facts)


@pytest.mark.parametrize("case", quick(close_cases(), 0, 1), ids=case_name)
def test_slices_are_as_close_to_micro_steps_as_these_to_others(bench: Bench, case: Case) -> None:
    facts, oracle = bench.run(case, "memascend"), bench.run(case, "oracle")
    for rank, expected in zip(facts, oracle, strict=True):
        assert rank["start"] == expected["start"]
        assert_losses_are_close(rank, expected, rel=2e-3)
        worst = max(differences_of_updates(rank, expected).values())
        print(
            f"{case_name(case)}: weights {difference_of_weights(rank, expected):.1e}, "
            f"updates {worst:.3f} of {updates_rel(case):.3f}"
        )
        assert worst <= updates_rel(case)
    assert_memascend_did_it(case, facts)


def assert_losses_are_close(rank: Facts, expected: Facts, *, rel: float) -> None:
    losses = rank["step_losses"]
    assert losses == pytest.approx(expected["step_losses"][-len(losses) :], rel=rel)


def updates_rel(case: Case) -> float:
    """The bound of a weight's difference, relative to what training changed of it.

    A sum in another order differs by about one relative step of the dtype for each rounding, as
    many as there are micro-steps of all ranks. AdamW moves an element by about the learning rate,
    however small its gradient: another sign is what counts, which only gradients below that
    difference have. These are a share `step * roundings` of all elements, each twice a move away,
    so the norm differs by 2 * sqrt(share). One micro-step too few of eight would differ by 0.68:
    the signs of sums that have a correlation of sqrt(7/8).
    """
    step = {"bf16": 2.0**-8, "fp16": 2.0**-11}[case.dtype]
    return 2 * math.sqrt(max(1, case.slices) * case.accumulation * case.world * step)


def difference_of_weights(rank: Facts, expected: Facts) -> float:
    """Return the largest difference of a weight by its norm, as docs/context.md has it."""
    return max(
        float(np.linalg.norm(rank["end_values"][name] - end) / np.linalg.norm(end))
        for name, end in expected["end_values"].items()
        if name.endswith("weight")
    )


def differences_of_updates(rank: Facts, expected: Facts) -> dict[str, float]:
    """For each weight the difference of two runs, by the norm of what training changed of it.

    Biases are left out: those of keys change nothing that softmax sees, and move by roundings.
    """
    found = {}
    for name, start in expected["start_values"].items():
        if name.endswith("weight"):
            end, other = expected["end_values"][name], rank["end_values"][name]
            found[name] = float(np.linalg.norm(other - end) / np.linalg.norm(end - start))
    return found
