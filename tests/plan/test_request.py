"""Requests: what is read from a DeepSpeed JSON, and what cannot be."""

from __future__ import annotations

import contextlib
import enum
import json
from pathlib import Path
from typing import Any

import pytest

from memascend.base.units import MIB
from memascend.config.block import parse_block
from memascend.config.deepspeed import parse_deepspeed
from memascend.errors import ConfigError
from memascend.plan.request import (
    PlanRequest,
    check_limit_can_be_kept,
    why_not_during_backward,
    why_whole_steps,
)

ROOT = Path(__file__).resolve().parents[2]


def test_the_gpu_configuration_reads_as_the_defaults() -> None:
    ds_config = json.loads((ROOT / "configs" / "nvme_gpu.json").read_text())
    request = PlanRequest.from_deepspeed(ds_config)
    # Besides what the file says for stock's sake, as the tutorials do.
    expected = PlanRequest(
        arriving_dtype="bf16",
        accumulation_dtype="bf16",
        state_count=2,
        max_in_cpu=10**9,
        guesses=True,
        tries_during_backward=True,
    )
    assert request == expected


def nvme(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}, **keys}


def test_a_configuration_left_to_the_trainer_gets_its_defaults() -> None:
    auto = {"enabled": "auto"}
    request = PlanRequest.from_deepspeed(
        nvme(bf16=auto, fp16=auto, gradient_accumulation_steps="auto", optimizer={"type": "auto"})
    )
    assert (request.precision, request.gradient_accumulation_steps) == ("bf16", 1)
    assert (request.optimizer, request.states) == ("AdamW", 2)
    assert (request.parameters_device, request.optimizer_device) == ("nvme", "none")


def test_states_have_the_dtype_of_the_block() -> None:
    assert PlanRequest.from_deepspeed(nvme()).states_bytes == 8
    block = {"streaming": {"optimizer": {"state_dtype": "bf16"}}}
    request = PlanRequest.from_deepspeed(nvme(memascend=block))
    assert (request.state_dtype, request.states_bytes) == ("bf16", 4)
    assert PlanRequest(master_dtype="bf16").states_bytes == 8  # not those of the master weights


def test_activations_go_to_the_drive_where_the_block_says_so() -> None:
    assert not PlanRequest.from_deepspeed(nvme(memascend={})).has_activations
    block = {"activations": {"enabled": True}}
    assert PlanRequest.from_deepspeed(nvme(memascend=block)).has_activations


def test_parsed_settings_come_with_their_block() -> None:
    settings = parse_deepspeed(nvme(memascend={"verify": "full"}))
    with pytest.raises(TypeError, match="block"):
        PlanRequest.from_deepspeed(settings)
    block = parse_block({"verify": "full"})
    assert PlanRequest.from_deepspeed(settings, block=block).verify == "full"


UNCLIPPED = {"gradient_clipping": 0.0}
MUON = {"optimizer": {"type": "Muon", "params": {}}}


@pytest.mark.parametrize(
    ("block", "keys", "expected"),
    [
        ({}, UNCLIPPED, True),
        ({}, {"gradient_clipping": 0}, True),
        ({}, {}, True),
        ({}, {"gradient_clipping": 1.0}, True),
        ({}, {"gradient_clipping": "auto"}, True),
        ({}, UNCLIPPED | {"optimizer": {"type": "Lion"}}, False),
        ({}, UNCLIPPED | {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, False),
        ({"optimizer": {"during_backward": False}}, UNCLIPPED, False),
        ({"optimizer": {"during_backward": True, "fused": False}}, UNCLIPPED, False),
        ({"gradients": {"enabled": False}}, UNCLIPPED, False),
    ],
)
def test_a_step_begins_during_backward_where_nothing_is_against_it(
    block: dict[str, Any], keys: dict[str, Any], expected: bool
) -> None:
    streaming = {"optimizer": {"during_backward": True}} | block
    ds_config = nvme(memascend={"streaming": streaming}, **keys)
    assert not PlanRequest.from_deepspeed(ds_config).during_backward
    ds_config["zero_optimization"]["offload_optimizer"] = {"device": "nvme"}
    assert PlanRequest.from_deepspeed(ds_config).during_backward == expected


@pytest.mark.parametrize(
    ("keys", "expected"), [({}, True), (UNCLIPPED, True), ({"optimizer": {"type": "Lion"}}, False)]
)
def test_a_run_finds_out_whether_steps_during_backward_pay_where_they_can_be(
    keys: dict[str, Any], expected: bool
) -> None:
    request = PlanRequest.from_deepspeed(on_drive(**keys))
    assert request.tries_during_backward == request.may_begin_early == expected
    assert not request.during_backward


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (UNCLIPPED, False),
        ({}, True),  # DeepSpeed's default is not 0
        ({"gradient_clipping": 0.5}, True),
        ({"gradient_clipping": "auto"}, True),  # a Trainer clips unless it is told not to
    ],
)
def test_with_clipping_a_step_during_backward_is_a_guess(
    keys: dict[str, Any], expected: bool
) -> None:
    assert PlanRequest.from_deepspeed(nvme(**keys)).guesses == expected


@pytest.mark.parametrize(
    ("block", "keys", "expected"),
    [
        ({}, {}, True),
        ({}, {"gradient_clipping": 1.0}, True),
        ({"optimizer": {"overlap": False}}, {}, False),
        ({"optimizer": {"fused": False}}, {}, False),
        ({"gradients": {"enabled": False}}, {}, False),
        ({}, {"optimizer": {"type": "Lion"}}, False),
    ],
)
def test_a_step_goes_on_behind_its_caller_where_it_is_made_in_one_pass(
    block: dict[str, Any], keys: dict[str, Any], expected: bool
) -> None:
    ds_config = nvme(memascend={"streaming": block}, **keys)
    assert not PlanRequest.from_deepspeed(ds_config).overlaps  # the optimizer is on no drive
    ds_config["zero_optimization"]["offload_optimizer"] = {"device": "nvme"}
    assert PlanRequest.from_deepspeed(ds_config).overlaps == expected


@pytest.mark.parametrize(
    ("block", "keys", "expected"),
    [
        ({}, {}, True),
        ({"optimizer": {"state_dtype": "bf16"}}, {}, True),
        ({"optimizer": {"overlap": False}}, {"gradient_clipping": 1.0}, True),
        ({"optimizer": {"split_master": False}}, {}, False),
        ({"optimizer": {"fused": False}}, {}, False),
        ({"optimizer": {"enabled": False}}, {}, False),
        ({"gradients": {"enabled": False}}, {}, False),
        ({}, {"fp16": {"enabled": True}}, False),
        ({}, {"bf16": {"enabled": False}}, False),
        ({}, {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, False),
        ({}, {"optimizer": {"type": "Lion"}}, False),
        ({}, {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, False),
        ({}, {"torch_autocast": {"enabled": True}}, False),
    ],
)
def test_master_weights_are_in_halves_where_one_pass_steps_those_of_bf16(
    block: dict[str, Any], keys: dict[str, Any], expected: bool
) -> None:
    keys = {"bf16": {"enabled": "fp16" not in keys}} | keys
    ds_config = nvme(memascend={"streaming": block}, **keys)
    assert not PlanRequest.from_deepspeed(ds_config).splits_master  # the optimizer is on no drive
    ds_config["zero_optimization"]["offload_optimizer"] = {"device": "nvme"}
    request = PlanRequest.from_deepspeed(ds_config)
    assert request.splits_master == expected
    if expected:
        assert request.stored_master_itemsize == request.master_itemsize - 2
    else:
        assert request.stored_master_itemsize == request.master_itemsize
    # Parameters in host memory may change unseen; under a limit none are there.
    ds_config["zero_optimization"]["offload_param"]["max_in_cpu"] = 10**6
    assert not PlanRequest.from_deepspeed(ds_config).splits_master
    if all(section.get("enabled", True) for section in block.values()):
        ds_config["memascend"]["host_memory_limit"] = "4GiB"
        assert PlanRequest.from_deepspeed(ds_config).splits_master == expected


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (UNCLIPPED, ""),
        ({"gradient_clipping": 0.5}, ""),
        (UNCLIPPED | {"optimizer": {"type": "Lion"}}, "DeepSpeedCPUAdam"),
        (UNCLIPPED | {"torch_autocast": {"enabled": True}}, "in one pass"),
        (UNCLIPPED | MUON, ""),
        (UNCLIPPED | MUON | {"fp16": {"enabled": True}, "bf16": {"enabled": False}}, ""),
        (MUON | {"gradient_clipping": 0.5}, "with gradient_clipping Muon's updates"),
        (MUON | {"gradient_clipping": "auto"}, "with gradient_clipping Muon's updates"),
    ],
)
def test_why_no_step_begins_during_backward_is_said(keys: dict[str, Any], reason: str) -> None:
    block = parse_block({"streaming": {"optimizer": {"during_backward": True}}})
    settings = parse_deepspeed(on_drive(**keys))
    found = why_not_during_backward(block, settings)
    assert reason in found
    assert bool(found) == bool(reason)
    assert PlanRequest.from_deepspeed(settings, block=block).during_backward == (not reason)
    off = parse_block({"streaming": {"optimizer": {"during_backward": False}}})
    assert why_not_during_backward(off, settings) == ""


def test_muon_begins_during_backward_on_demand_with_one_rank_and_exact_momentum() -> None:
    settings = parse_deepspeed(on_drive(**UNCLIPPED, **MUON))
    for steps, world, reason in (
        ({"during_backward": True}, 1, ""),
        ({"during_backward": True}, 2, "several ranks make Muon's updates together"),
        ({"during_backward": "auto"}, 1, "unless it is true"),
        ({"during_backward": True, "state_dtype": "int8"}, 1, 'with state_dtype "int8"'),
        ({"during_backward": True, "fused": False}, 1, "in one pass"),
    ):
        block = parse_block({"streaming": {"optimizer": steps}})
        found = why_not_during_backward(block, settings, world=world)
        assert reason in found
        assert bool(found) == bool(reason)
        request = PlanRequest.from_deepspeed(settings, block=block, world=world)
        assert request.may_begin_early == (not reason)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({}, ""),
        ({"optimizer": {"type": "AdamW"}, "torch_autocast": {"enabled": False}}, ""),
        ({"optimizer": {"type": "Muon"}}, ""),
        ({"optimizer": {"type": "Muon", "params": {"torch_adam": True}}}, "Muon's other"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast"),
    ],
)
def test_what_keeps_an_optimizer_from_tiles_is_said_and_no_limit_holds_with_it(
    keys: dict[str, Any], reason: str
) -> None:
    settings = parse_deepspeed(on_drive(**keys))
    assert reason in why_whole_steps(settings)
    assert bool(why_whole_steps(settings)) == bool(reason)
    block = parse_block({"host_memory_limit": "1GiB"})
    with pytest.raises(ConfigError, match=reason) if reason else contextlib.nullcontext():
        check_limit_can_be_kept(block, settings)


def test_momentum_that_stays_in_memory_is_such_a_reason() -> None:
    ds_config = on_drive(optimizer={"type": "Muon"})
    ds_config["zero_optimization"]["save_muon_momentum_buffer_in_memory"] = True
    settings = parse_deepspeed(ds_config)
    assert "save_muon_momentum_buffer_in_memory" in why_whole_steps(settings)
    assert not PlanRequest.from_deepspeed(ds_config).is_tiled
    with pytest.raises(ConfigError, match="save_muon_momentum_buffer_in_memory"):
        check_limit_can_be_kept(parse_block({"host_memory_limit": "1GiB"}), settings)


def test_muon_steps_in_tiles_and_never_during_backward() -> None:
    request = PlanRequest.from_deepspeed(on_drive(optimizer={"type": "Muon"}))
    assert (request.is_muon, request.is_tiled, request.has_known_start) == (True, True, True)
    assert (request.overlaps, request.may_begin_early) == (True, False)
    assert not request.splits_master  # in fp32
    in_bf16 = on_drive(optimizer={"type": "Muon"}, bf16={"enabled": True})
    assert PlanRequest.from_deepspeed(in_bf16).splits_master
    assert PlanRequest(optimizer="Muon").momentum_itemsize == 2
    assert PlanRequest(optimizer="Muon").flag_itemsize == 1 / 8
    assert PlanRequest(optimizer="Muon", state_dtype="int8").flag_itemsize == 0
    wide = PlanRequest(optimizer="Muon", accumulation_dtype="fp32", arriving_dtype="fp32")
    assert wide.momentum_itemsize == 4


def test_a_part_of_the_optimizer_on_the_device_is_such_a_reason() -> None:
    ds_config = on_drive()
    ds_config["zero_optimization"]["offload_optimizer"]["ratio"] = 0.5
    assert "ratio" in why_whole_steps(parse_deepspeed(ds_config))
    assert not PlanRequest.from_deepspeed(ds_config).overlaps


def on_drive(**keys: Any) -> dict[str, Any]:
    ds_config = nvme(**keys)
    ds_config["zero_optimization"]["offload_optimizer"] = {"device": "nvme"}
    return ds_config


def test_what_a_configuration_says_is_read() -> None:
    ds_config = nvme(
        fp16={"enabled": True},
        data_types={"grad_accum_dtype": "fp32"},
        train_batch_size=64,
        train_micro_batch_size_per_gpu=2,
        optimizer={"type": "SGD", "params": {"momentum": 0.9}},
        memascend={
            "streaming": {"optimizer": {"tile_bytes": "1MiB"}},
            "buffer_pool": {"prefetch_bytes": 7},
        },
    )
    ds_config["zero_optimization"]["sub_group_size"] = 1e8
    request = PlanRequest.from_deepspeed(ds_config, world=4)
    assert (request.precision, request.gradient_itemsize) == ("fp16", 4)
    assert request.window.appends
    assert request.gradient_accumulation_steps == 8
    assert (request.states, request.sub_group_size) == (1, 10**8)
    assert (request.tile_bytes, request.prefetch_bytes) == (MIB, 7)
    by_slice = {"micro_batches": {"count": 2, "reduction": "slice"}}
    assert not PlanRequest.from_deepspeed(ds_config | {"memascend": by_slice}).window.appends
    in_fp32 = ds_config | {"communication_data_type": "fp32"}
    assert not PlanRequest.from_deepspeed(in_fp32, world=4).window.appends


def test_a_configuration_from_python_reads_as_one_from_json() -> None:
    class Device(str, enum.Enum):
        nvme = "nvme"

    offload, text = {"device": Device.nvme}, {"device": "nvme"}
    zero = {"stage": 3, "offload_param": offload, "offload_optimizer": offload}
    python = PlanRequest.from_deepspeed(
        {
            "bf16": {"enabled": "true"},
            "data_types": {"grad_accum_dtype": "torch.float32"},
            "zero_optimization": {**zero, "sub_group_size": "1e8"},
        }
    )
    zero |= {"offload_param": text, "offload_optimizer": text}
    assert python == PlanRequest.from_deepspeed(
        {
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": {**zero, "sub_group_size": 10**8},
        }
    )
    assert (python.parameters_device, python.optimizer_device) == ("nvme", "nvme")


@pytest.mark.parametrize(
    ("ds_config", "message"),
    [
        ({}, "stage 3"),
        ({"zero_optimization": {"stage": 2}}, "stage 3"),
        ({"zero_optimization": True}, "zero_optimization: true is not allowed"),
        (nvme(gradient_accumulation_steps=1.5), "gradient_accumulation_steps: 1.5 .* whole number"),
        (nvme(data_types={"grad_accum_dtype": "int8"}), "data_types.grad_accum_dtype"),
        (nvme(communication_data_type="int8"), "communication_data_type"),
        (nvme(memascend={"tile": 1}), "unknown key"),
    ],
)
def test_a_configuration_that_cannot_be_is_an_error(
    ds_config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        PlanRequest.from_deepspeed(ds_config)


@pytest.mark.parametrize(
    "wrong",
    [
        {"world": 0},
        {"gradient_accumulation_steps": 0},
        {"precision": "int8"},
        {"accumulation_dtype": "int8"},
        {"master_dtype": "int8"},
        {"optimizer_device": "gpu"},
        {"sub_group_size": -1},
        {"drive_count": 0},
    ],
)
def test_an_impossible_request_is_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PlanRequest(**wrong)


def test_verification_and_volumes_come_from_the_block() -> None:
    zero = {"stage": 3, "offload_param": {"device": "nvme"}}
    block = {"verify": "reads", "volumes": ["/a", "/b"]}
    request = PlanRequest.from_deepspeed({"zero_optimization": zero, "memascend": block})
    assert (request.verify, request.volume_count) == ("reads", 2)
    assert PlanRequest.from_deepspeed({"zero_optimization": zero}).verify == "off"


@pytest.mark.parametrize(("ranks", "drives"), [(1, 3), (2, 2), (3, 1), (8, 1)])
def test_ranks_of_a_machine_share_its_drives(ranks: int, drives: int) -> None:
    """Each rank's tensors are on all of them: together the ranks keep them busy."""
    block = {"volumes": ["/a", "/b", "/c"]}
    ds_config = {"zero_optimization": {"stage": 3}, "memascend": block}
    request = PlanRequest.from_deepspeed(ds_config, world=2 * ranks, local_world=ranks)
    assert (request.volume_count, request.drive_count) == (3, drives)
    del ds_config["memascend"]
    assert PlanRequest.from_deepspeed(ds_config, world=ranks, local_world=ranks).drive_count == 1
