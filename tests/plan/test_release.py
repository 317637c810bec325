"""What the installed DeepSpeed cannot do is refused by name, with the release that can."""

from __future__ import annotations

from typing import Any

import pytest

from memascend.config import installed
from memascend.config.block import parse_block
from memascend.config.deepspeed import parse_deepspeed
from memascend.config.installed import (
    CHECKPOINT_INPUTS,
    MUON,
    MUON_BY_MATRIX,
    WHOLE_STEPS,
    Ability,
)
from memascend.errors import ConfigError
from memascend.plan.release import check_release

NVME = {"device": "nvme", "nvme_path": "/mnt"}
OFF = {"enabled": False}


def zero(**changes: Any) -> dict[str, Any]:
    offload = {"stage": 3, "offload_param": NVME, "offload_optimizer": NVME}
    return {"zero_optimization": offload | changes}


#: The settings, the block, the ability that is lacking, and words of the message.
REFUSED: list[tuple[dict[str, Any], dict[str, Any], Ability, str]] = [
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
