"""Dtypes of masters and states: what a DeepSpeed JSON asks for, and what it may not have beside."""

from __future__ import annotations

from typing import Any

import pytest

from memascend.config.block import parse_block
from memascend.config.deepspeed import DeepSpeedSettings, parse_deepspeed
from memascend.errors import ConfigError
from memascend.plan.optimizer_dtypes import (
    check_fewer,
    check_masters,
    fewer_bits,
    inexactness,
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
BF16_BLOCK = {"streaming": {"optimizer": {"state_dtype": "bf16"}}}
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


@pytest.mark.parametrize("form", ["bf16", "int8", "int8/bf16"])
def test_the_blocks_own_states_have_its_form_whatever_master_weights_are(form: str) -> None:
    block = parse_block({"streaming": {"optimizer": {"state_dtype": form}}})
    assert state_dtype(block, DeepSpeedSettings()) == form


def test_settings_that_round_are_named_with_every_run() -> None:
    assert fewer_bits(parse_block({})) == ""
    both = {"state_dtype": "int8", "master_dtype": "bf16+8"}
    block = parse_block({"streaming": {"optimizer": both}})
    assert fewer_bits(block) == 'state_dtype="int8" and master_dtype="bf16+8"'
    assert inexactness(block).startswith(f"streaming.optimizer.{fewer_bits(block)} rounds")


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


def check(block: dict[str, Any], **keys: Any) -> None:
    zero = {"stage": 3, "offload_optimizer": keys.pop("offload_optimizer", NVME)}
    zero["offload_param"] = keys.pop("offload_param", NVME)
    check_fewer(parse_block(block), parse_deepspeed({"zero_optimization": zero, **keys}))


@pytest.mark.parametrize(
    ("keys", "found", "remedy"),
    [
        ({"offload_optimizer": {"device": "cpu"}}, "offload_optimizer.device is 'cpu'", '"nvme"'),
        ({"offload_optimizer": {}}, "offload_optimizer.device is 'none'", '"nvme"'),
        ({"optimizer": {"type": "Lion"}}, "optimizer.type is 'Lion'", '"AdamW"'),
        (
            {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}},
            "torch_adam is true",
            "Take it out",
        ),
    ],
)
def test_what_bf16_states_cannot_be_with_is_named(
    keys: dict[str, Any], found: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(BF16_BLOCK, **keys)
    message = str(caught.value)
    assert 'memascend.streaming.optimizer.state_dtype="bf16"' in message
    assert found in message
    assert remedy in message
    check({}, **keys)


@pytest.mark.parametrize(
    ("keys", "found", "remedy"),
    [
        ({"fp16": {"enabled": True}}, "they are in fp16", "Turn bf16 on"),
        ({}, "they are in fp32", "Turn bf16 on"),
        (
            {"bf16": {"enabled": True}, "offload_param": {"device": "cpu"}},
            "offload_param.device is 'cpu'",
            'Set it to "nvme"',
        ),
        (
            {"bf16": {"enabled": True}, "offload_param": NVME | {"max_in_cpu": 10**9}},
            "max_in_cpu keeps some in memory",
            "Set memascend.host_memory_limit, which overrides it",
        ),
    ],
)
def test_master_weights_of_24_bits_need_a_bf16_parameter_on_the_drive(
    keys: dict[str, Any], found: str, remedy: str
) -> None:
    block = {"streaming": {"optimizer": {"master_dtype": "bf16+8"}}}
    with pytest.raises(ConfigError) as caught:
        check(block, **keys)
    message = str(caught.value)
    assert message.startswith('memascend.streaming.optimizer.master_dtype="bf16+8" stores')
    assert message.endswith(f"{found}. {remedy}, or leave master_dtype out")
    check(block, bf16={"enabled": True}, offload_param=NVME)
    check(BF16_BLOCK, **keys)


def test_master_weights_of_24_bits_need_the_stream_of_parameters() -> None:
    """Small ones would stay in memory, and with them whole master weights of most sub-groups."""
    streams = {"optimizer": {"master_dtype": "bf16+8"}, "parameters": {"enabled": False}}
    with pytest.raises(ConfigError, match=r"streaming\.parameters\.enabled is false\. Turn it on"):
        check({"streaming": streams}, bf16={"enabled": True}, offload_param=NVME)
    settings = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    settings["zero_optimization"] |= dict.fromkeys(("offload_param", "offload_optimizer"), NVME)
    for is_on in (True, False):
        block = {"streaming": {"parameters": {"enabled": is_on}}}
        request = PlanRequest.from_deepspeed(settings, block=parse_block(block))
        assert request.splits_master == is_on


def test_a_message_names_both_settings_and_how_to_leave_them_out() -> None:
    both = {"state_dtype": "int8", "master_dtype": "bf16+8"}
    with pytest.raises(ConfigError) as caught:
        check({"streaming": {"optimizer": both}}, optimizer={"type": "Lion"})
    message = str(caught.value)
    assert 'state_dtype="int8" and master_dtype="bf16+8" needs DeepSpeedCPUAdam' in message
    assert message.endswith("or leave state_dtype and master_dtype out")


def test_deepspeeds_own_engine_does_not_do() -> None:
    with pytest.raises(ConfigError, match=r"direct_nvme\.enabled is false"):
        check(BF16_BLOCK | {"direct_nvme": {"enabled": False}})


@pytest.mark.parametrize(
    "keys",
    [
        {},  # the script's own, which is looked at when it is there
        {"optimizer": {"type": "Adam"}},
        {"optimizer": {"type": "adamw", "params": {"torch_adam": False}}},
        {"optimizer": {"type": "auto"}},
        {"optimizer": {"type": "Muon"}},
    ],
)
def test_adam_and_muon_may_have_bf16_states(keys: dict[str, Any]) -> None:
    check(BF16_BLOCK, **keys)


def test_muon_has_no_master_weights_of_24_bits() -> None:
    muon = {"optimizer": {"type": "Muon"}, "bf16": {"enabled": True}}
    check({"streaming": {"optimizer": {"state_dtype": "int8"}}}, **muon)
    with pytest.raises(ConfigError, match="Leave master_dtype out"):
        check({"streaming": {"optimizer": {"master_dtype": "bf16+8"}}}, **muon)
