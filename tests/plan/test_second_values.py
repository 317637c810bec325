"""Where steps begin during backward by default, and what that takes and moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memascend.base.streams import PARAMETERS
from memascend.base.units import GIB, format_nbytes
from memascend.config.block import parse_block
from memascend.config.deepspeed import parse_deepspeed
from memascend.plan.derive import SECOND_VALUES, Plan, PlanRequest, derive
from memascend.plan.knobs import LimitTooSmallError
from memascend.plan.muon import matrices_of
from memascend.plan.second_values import (
    advise_during_backward,
    checkpoint_bytes,
    lacking_bytes,
    model_bytes,
    saving_bytes,
    second_values_bytes,
)
from memascend.plan.shapes import builtin
from tests.support.plan_models import decoder

MODEL = builtin("Llama-3.1-8B")
NVME = {"device": "nvme", "nvme_path": "/mnt/ssd"}
ON_DRIVE = {"stage": 3, "offload_param": NVME, "offload_optimizer": NVME}
TRIES = PlanRequest(tries_during_backward=True)


def planned(*, limit: int | None = None, block: Any = None, **keys: Any) -> Plan:
    """The plan of a DeepSpeed JSON with these keys."""
    content = {"zero_optimization": ON_DRIVE, "bf16": {"enabled": True}, **keys}
    request = PlanRequest.from_deepspeed(parse_deepspeed(content), block=parse_block(block or {}))
    return derive(MODEL, request=request, limit_bytes=limit)


def test_by_default_a_run_finds_out_with_and_without_clipping() -> None:
    for clipping in (0.0, 1.0, "auto"):
        request = planned(gradient_clipping=clipping).request
        assert (request.tries_during_backward, request.during_backward) == (True, False)


@pytest.mark.parametrize(
    "keys",
    [
        {"optimizer": {"type": "Muon"}},
        {"optimizer": {"type": "Lion"}},
        {"zero_optimization": {**ON_DRIVE, "offload_optimizer": {"device": "cpu"}}},
        {"zero_optimization": {**ON_DRIVE, "offload_param": {"device": "cpu"}}},
        {"zero_optimization": {**ON_DRIVE, "offload_optimizer": {**NVME, "ratio": 0.5}}},
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        {"block": {"streaming": {"optimizer": {"fused": False}}}},
        {"block": {"streaming": {"gradients": {"enabled": False}}}},
        {"block": {"streaming": {"optimizer": {"during_backward": False}}}},
    ],
    ids=str,
)
def test_where_it_cannot_be_the_plan_is_that_of_steps_after_backward(keys: dict[str, Any]) -> None:
    plan = planned(**keys)
    assert not plan.request.tries_during_backward
    block = dict(keys.pop("block", {}))
    streaming = dict(block.get("streaming", {}))
    streaming["optimizer"] = {**streaming.get("optimizer", {}), "during_backward": False}
    assert plan == planned(block={"streaming": streaming}, **keys)


def test_a_limit_takes_memory_from_nothing_else_and_adds_few_writes() -> None:
    default, after = derive(MODEL, request=TRIES), derive(MODEL, request=PlanRequest())
    assert default.host_bytes - after.host_bytes == 8 * default.tile_numel * 2
    for limit, tries in (
        (after.host_bytes, False),
        (default.host_bytes, True),
        (default.host_bytes + GIB, True),  # 1 GiB of parameters is 1 % of what a step writes
        (default.host_bytes + 6 * GIB, False),
        (default.host_bytes + 200 * GIB, False),
    ):
        plan = derive(MODEL, request=TRIES, limit_bytes=limit)
        assert plan.request.tries_during_backward == tries, limit
        if not tries:
            assert plan == derive(MODEL, request=PlanRequest(), limit_bytes=limit)


@pytest.mark.parametrize("keys", [{}, {"drive_count": 2}, {"verify": "full", "world": 2}])
def test_the_smallest_limit_is_that_of_steps_after_backward(keys: dict[str, Any]) -> None:
    after = PlanRequest(**keys)
    tries, demanded = (
        replace(after, tries_during_backward=True),
        replace(after, during_backward=True),
    )
    least = []
    for request in (after, tries, demanded):
        with pytest.raises(LimitTooSmallError) as error:
            derive(MODEL, request=request, limit_bytes=1)
        least.append(error.value.minimum_bytes)
    assert least[0] == least[1] < least[2]
    plan = derive(MODEL, request=tries, limit_bytes=least[0])
    assert plan == derive(MODEL, request=after, limit_bytes=least[0])


@pytest.mark.parametrize("world", [1, 4])
def test_second_values_have_room_only_beside_a_checkpoint_and_the_model(world: int) -> None:
    plan = derive(MODEL, request=replace(TRIES, world=world))
    early = derive(MODEL, request=PlanRequest(world=world, during_backward=True))
    assert second_values_bytes(plan) == early.drive[SECOND_VALUES]
    numel = plan.trained_numel
    assert saving_bytes(plan) == 2 * 12 * numel + 2 * plan.drive[PARAMETERS]
    free_bytes = second_values_bytes(plan) + saving_bytes(plan)
    for short in (0, 1):
        found = lacking_bytes(
            plan, free_bytes - short, ranks=1, taken_bytes=second_values_bytes(plan)
        )
        assert found == short
    assert lacking_bytes(plan, 2 * saving_bytes(plan), ranks=2) == 0
    assert lacking_bytes(plan, 2 * saving_bytes(plan) - 1, ranks=2) == 1


def test_frozen_parameters_are_saved_though_they_have_no_second_values() -> None:
    shapes = decoder()
    first, *others = shapes.tensors
    tensors = (first, *(replace(tensor, trainable=False) for tensor in others))
    frozen = replace(shapes, tensors=tensors)
    plan = derive(frozen, request=TRIES)
    assert plan.trained_numel == first.numel
    assert saving_bytes(plan) > 2 * 2 * shapes.numel
    frozen_bytes = 2 * (shapes.numel - first.numel)
    assert checkpoint_bytes(plan, is_portable=True) == 24 * first.numel + frozen_bytes
    assert model_bytes(plan) == 2 * shapes.numel


@pytest.mark.parametrize(
    ("keys", "portable", "small"),
    [
        ({}, 24, 16),
        ({"state_dtype": "bf16"}, 16, 12),
        ({"state_dtype": "int8"}, 24, 16),  # decoded
        ({"state_dtype": "int8/bf16"}, 20, 14),
        ({"optimizer": "SGD"}, 8, 8),
    ],
)
def test_a_checkpoint_has_weights_twice_and_states_once_or_twice(
    keys: dict[str, Any], portable: int, small: int
) -> None:
    plan = derive(MODEL, request=PlanRequest(**keys))
    assert checkpoint_bytes(plan, is_portable=True) == portable * MODEL.numel
    assert checkpoint_bytes(plan, is_portable=False) == small * MODEL.numel
    assert model_bytes(plan) == 2 * MODEL.numel


def test_a_checkpoint_of_muon_has_one_state_for_a_matrix() -> None:
    plan = derive(MODEL, request=PlanRequest(optimizer="Muon"))
    numel = sum(one.numel for one in matrices_of(MODEL))
    assert plan.matrices_numel == numel > 0.8 * MODEL.numel
    for is_portable, (others, matrix) in {True: (24, 16), False: (16, 12)}.items():
        found = checkpoint_bytes(plan, is_portable=is_portable)
        assert found == others * (MODEL.numel - numel) + matrix * numel


def test_the_note_has_the_bytes_of_steps_after_during_and_made_again() -> None:
    assert advise_during_backward(MODEL, derive(MODEL, request=PlanRequest()), lambda _: 0.0) == ""
    plan = derive(MODEL, request=TRIES)
    seen: list[Plan] = []
    found = advise_during_backward(MODEL, plan, lambda one: seen.append(one) or float(len(seen)))
    assert "bytes and seconds are those of steps after backward" in found
    assert f"the drive has {format_nbytes(second_values_bytes(plan))} for second values" in found
    guessed = derive(MODEL, request=PlanRequest(during_backward=True, guesses=True))
    assert seen[0].read_bytes == guessed.read_bytes
    assert seen[0].written_bytes == guessed.written_bytes
    assert seen[0].drive == guessed.drive
    read, written = (
        sum(one.values()) / MODEL.numel for one in (plan.read_bytes, plan.written_bytes)
    )
    # Three of four tiles: parameter, half of a master weight, two moments.
    again = (2 + 2 + 8) * 3 / 4
    assert f"reads {read:.3g} and writes {written:.3g} bytes of each parameter after" in found
    right = read - 2 * 3 / 4, written
    assert f"reads {right[0]:.3g} and writes {right[1]:.3g} if it begins during it" in found
    assert f"reads {read + again:.3g} and writes {written + again:.3g} if it then has" in found
    assert "(1.0 s instead of 2.0 s)" in found
