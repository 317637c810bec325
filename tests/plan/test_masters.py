"""Master weights in 16 bits: what a DeepSpeed JSON asks for, and what it may not have beside."""

from __future__ import annotations

from typing import Any

import pytest

from memascend.config.block import parse_block
from memascend.config.deepspeed import DeepSpeedSettings, parse_deepspeed
from memascend.errors import ConfigError
from memascend.plan.masters import (
    check_masters,
    master_dtype,
    narrow_key,
    state_dtype,
)
from memascend.plan.request import PlanRequest

NARROW = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
BF16_STATES = {"bf16": NARROW["bf16"] | {"bf16_optimizer_states": True}}
FP16 = {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}
FP16_STATES = FP16 | {"optimizer": {"params": {"fp32_optimizer_states": False}}}
NVME = {"device": "nvme", "nvme_path": "/mnt"}
ZERO = {"stage": 3, "offload_param": NVME, "offload_optimizer": NVME}


@pytest.mark.parametrize(
    ("keys", "key", "dtypes"),
    [
        ({}, "", ("fp32", "fp32")),
        ({"bf16": {"enabled": True}}, "", ("fp32", "fp32")),
        ({"optimizer": {"params": {"fp32_optimizer_states": False}}}, "", ("fp32", "fp32")),
        (NARROW, "bf16.bf16_master_weights_and_grads", ("bf16", "fp32")),
        (BF16_STATES, "bf16.bf16_master_weights_and_grads", ("bf16", "bf16")),
        ({"bfloat16": NARROW["bf16"]}, "bfloat16.bf16_master_weights_and_grads", ("bf16", "fp32")),
        (FP16, "fp16.fp16_master_weights_and_grads", ("fp16", "fp32")),
        (FP16_STATES, "fp16.fp16_master_weights_and_grads", ("fp16", "fp16")),
    ],
)
def test_the_json_says_what_master_weights_and_states_take(
    keys: dict[str, Any], key: str, dtypes: tuple[str, str]
) -> None:
    settings = parse_deepspeed(keys)
    assert narrow_key(settings) == key
    assert (master_dtype(settings), state_dtype(parse_block({}), settings)) == dtypes
    request = PlanRequest.from_deepspeed({"zero_optimization": ZERO, **keys})
    assert (request.master_dtype, request.state_dtype) == dtypes
    assert request.overlaps == (not key)  # there is no pass over a tile in one for them


def test_the_blocks_own_states_are_in_bf16_whatever_master_weights_are() -> None:
    block = parse_block({"streaming": {"optimizer": {"state_dtype": "bf16"}}})
    assert state_dtype(block, DeepSpeedSettings()) == "bf16"


@pytest.mark.parametrize(
    ("block", "keys", "found", "remedy"),
    [
        (
            {"streaming": {"optimizer": {"enabled": False}}},
            NARROW,
            r"streaming\.optimizer\.enabled is false",
            "Turn it on",
        ),
        ({"direct_nvme": {"enabled": False}}, FP16, r"direct_nvme\.enabled is", "Turn it on"),
        (
            {"streaming": {"optimizer": {"state_dtype": "bf16"}}},
            NARROW,
            'state_dtype="bf16" needs',
            "Leave state_dtype out",
        ),
        (
            {},
            {"bf16": {"bf16_master_weights_and_grads": True}},
            r"bf16\.enabled is false",
            "Set it to true",
        ),
    ],
)
def test_what_they_cannot_be_with_is_named(
    block: dict[str, Any], keys: dict[str, Any], found: str, remedy: str
) -> None:
    parsed, key = parse_block(block), narrow_key(parse_deepspeed(keys))
    told = rf"^{key} keeps .*{found}.*{remedy}, or leave {key} out$"
    with pytest.raises(ConfigError, match=told):
        check_masters(parsed, parse_deepspeed({"zero_optimization": ZERO, **keys}))
    on_cpu = ZERO | {"offload_optimizer": {"device": "cpu"}}
    check_masters(parsed, parse_deepspeed({"zero_optimization": on_cpu, **keys}))
    check_masters(parsed, parse_deepspeed({"zero_optimization": ZERO}))


def test_what_the_trainer_fills_in_is_no_refusal() -> None:
    keys = {"bf16": {"enabled": "auto", "bf16_master_weights_and_grads": True}}
    check_masters(parse_block({}), parse_deepspeed({"zero_optimization": ZERO, **keys}))
