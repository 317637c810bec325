"""What the installed DeepSpeed cannot do is refused by name, with the release that can."""

from __future__ import annotations

from typing import Any

import pytest

from memascend.config import installed
from memascend.config.block import parse_block
from memascend.config.deepspeed import parse_deepspeed
from memascend.config.installed import (
    CHECKPOINT_INPUTS,
    INNER_PASSES,
    KEPT_POWERS,
    MUON,
    MUON_BY_MATRIX,
    SUMS_IN_FP32,
    WHOLE_STEPS,
    Ability,
)
from memascend.errors import ConfigError
from memascend.plan.derive import derive
from memascend.plan.release import check_release, check_settings, check_tiles
from memascend.plan.request import PlanRequest
from memascend.plan.shapes import builtin

NVME = {"device": "nvme", "nvme_path": "/mnt"}
OFF = {"enabled": False}


def zero(**changes: Any) -> dict[str, Any]:
    offload = {"stage": 3, "offload_param": NVME, "offload_optimizer": NVME}
    return {"zero_optimization": offload | changes}


#: The settings, the block, the ability that is lacking, and words of the message.
REFUSED: list[tuple[dict[str, Any], dict[str, Any], Ability, str]] = [
    (zero(), {"micro_batches": {"count": 2}}, INNER_PASSES, "memascend.micro_batches"),
    (
        zero() | {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        {"micro_batches": {"count": 2}},
        SUMS_IN_FP32,
        '"micro_batches": {"reduction": "slice"}',
    ),
    (zero(), {"streaming": {"optimizer": OFF}}, WHOLE_STEPS, "streaming.optimizer is off"),
    (zero(), {"direct_nvme": OFF}, WHOLE_STEPS, "direct_nvme is off"),
    (zero(), {"buffer_pool": OFF}, WHOLE_STEPS, "buffer_pool is off"),
    (zero(offload_optimizer={}), {"buffer_pool": OFF}, WHOLE_STEPS, "buffer_pool is off"),
    (zero(offload_optimizer=NVME | {"ratio": 0.5}), {}, WHOLE_STEPS, "offload_optimizer.ratio"),
    (zero() | {"torch_autocast": {"enabled": True}}, {}, WHOLE_STEPS, "torch_autocast"),
    (zero() | {"optimizer": {"type": "Muon"}}, {}, MUON, 'optimizer.type "Muon"'),
    (
        zero(save_muon_momentum_buffer_in_memory=True) | {"optimizer": {"type": "Muon"}},
        {},
        WHOLE_STEPS,
        "save_muon_momentum_buffer_in_memory",
    ),
    (
        zero() | {"activation_checkpointing": {"cpu_checkpointing": True}},
        {"activations": {"enabled": True}},
        CHECKPOINT_INPUTS,
        "leave cpu_checkpointing out",
    ),
]


@pytest.mark.parametrize(("settings", "block", "lacking", "words"), REFUSED)
def test_a_setting_that_the_release_cannot_serve_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    block: dict[str, Any],
    lacking: Ability,
    words: str,
) -> None:
    arguments = parse_block(block), parse_deepspeed(settings)
    monkeypatch.setattr(installed, "is_able", lambda ability: True)
    check_release(*arguments)
    monkeypatch.setattr(installed, "is_able", lambda ability: ability is not lacking)
    monkeypatch.setattr(installed, "installed_version", lambda: "0.18.7")
    with pytest.raises(ConfigError) as refused:
        check_release(*arguments)
    for part in (
        words,
        f"needs DeepSpeed {lacking.since} or later",
        "DeepSpeed 0.18.7 is installed",
    ):
        assert part in str(refused.value)


SERVED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (zero(), {}),
    (zero(), {"streaming": {"gradients": OFF}, "overflow_check": OFF, "allocator": OFF}),
    (zero(), {"activations": {"enabled": True}}),
    (zero() | {"activation_checkpointing": {"cpu_checkpointing": True}}, {}),  # as stock
    (zero(offload_optimizer={"device": "cpu"}), {"streaming": {"optimizer": OFF}}),
    (zero(offload_param={"device": "cpu"}), {"buffer_pool": OFF}),
]


@pytest.mark.parametrize(("settings", "block"), SERVED)
def test_the_rest_is_served_by_the_oldest_release(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], block: dict[str, Any]
) -> None:
    monkeypatch.setattr(installed, "is_able", lambda ability: False)
    check_release(parse_block(block), parse_deepspeed(settings))


def test_muon_needs_whole_sub_groups_where_its_updates_are_no_function_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = parse_block({}), parse_deepspeed(zero() | {"optimizer": {"type": "Muon"}})
    lacking = {WHOLE_STEPS, MUON_BY_MATRIX}
    monkeypatch.setattr(installed, "is_able", lambda ability: ability not in lacking)
    with pytest.raises(ConfigError, match=r"Muon needs whole gradients.*0\.19\.8 or later"):
        check_release(*arguments)
    monkeypatch.setattr(installed, "is_able", lambda ability: ability is not MUON_BY_MATRIX)
    check_release(*arguments)


NARROW = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
NOT_FUSED = {"streaming": {"optimizer": {"fused": False}}}


@pytest.mark.parametrize(
    ("settings", "block", "words"),
    [
        (zero(), NOT_FUSED, "streaming.optimizer.fused is false"),
        (zero() | NARROW, {}, "bf16.bf16_master_weights_and_grads"),
    ],
)
def test_tiles_that_an_older_release_would_step_by_itself_are_refused(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], block: dict[str, Any], words: str
) -> None:
    assert_tiles_are_served(settings, block)
    monkeypatch.setattr(installed, "is_able", lambda ability: ability is not KEPT_POWERS)
    with pytest.raises(ConfigError, match=rf"since {words}.* needs DeepSpeed 0\.19\.0 or later"):
        assert_tiles_are_served(settings, block)


@pytest.mark.parametrize(
    ("settings", "block"),
    [
        (zero(), {}),
        (zero() | {"optimizer": {"type": "Lion"}}, NOT_FUSED),
        (zero(offload_optimizer={"device": "cpu"}), NOT_FUSED),
        (
            zero(sub_group_size=1),
            {"streaming": {"optimizer": {"fused": False, "tile_bytes": "1GiB"}}},
        ),
    ],
    ids=["fused", "another optimizer", "on the host", "one tile each"],
)
def test_other_steps_are_served_by_the_oldest_release(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], block: dict[str, Any]
) -> None:
    monkeypatch.setattr(installed, "is_able", lambda ability: False)
    assert_tiles_are_served(settings, block)


def assert_tiles_are_served(settings: dict[str, Any], block: dict[str, Any]) -> None:
    """Raise ConfigError if tiles of a model of several tiles are refused."""
    parsed, active = parse_deepspeed(settings), parse_block(block)
    shapes = builtin("Qwen3-0.6B")
    plan = derive(shapes, request=PlanRequest.from_deepspeed(parsed, block=active))
    check_tiles(shapes, plan, active, parsed)


def test_every_reason_of_a_refusal_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the release are the only ones that another DeepSpeed takes away."""
    limit, int8 = (
        {"host_memory_limit": "1GiB"},
        {"streaming": {"optimizer": {"state_dtype": "int8"}}},
    )
    off = {"streaming": {"optimizer": OFF}}
    for settings, block, words in (
        (zero(), limit | off, "cannot be kept"),
        (zero() | {"optimizer": {"type": "Lion"}}, int8, "needs DeepSpeedCPUAdam"),
        (zero() | NARROW, off, "keeps master weights in 16 bits"),
        (zero(), off, "needs DeepSpeed 0.19.8 or later"),
    ):
        monkeypatch.setattr(installed, "is_able", lambda ability: False)
        with pytest.raises(ConfigError, match=words):
            check_settings(parse_block(block), parse_deepspeed(settings))
