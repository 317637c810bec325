"""Adam's moments in bf16: what a DeepSpeed JSON may not say beside them."""

from __future__ import annotations

from typing import Any

import pytest

from memascend.config.block import parse_block
from memascend.config.deepspeed import parse_deepspeed
from memascend.errors import ConfigError
from memascend.plan.state_dtype import check_state_dtype

BF16 = {"streaming": {"optimizer": {"state_dtype": "bf16"}}}
NVME = {"device": "nvme", "nvme_path": "/mnt"}


def check(block: dict[str, Any], **keys: Any) -> None:
    zero = {"stage": 3, "offload_optimizer": keys.pop("offload_optimizer", NVME)}
    check_state_dtype(parse_block(block), parse_deepspeed({"zero_optimization": zero, **keys}))


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
        check(BF16, **keys)
    message = str(caught.value)
    assert 'memascend.streaming.optimizer.state_dtype="bf16"' in message
    assert found in message
    assert remedy in message
    check({}, **keys)


def test_deepspeeds_own_engine_does_not_do() -> None:
    with pytest.raises(ConfigError, match=r"direct_nvme\.enabled is false"):
        check(BF16 | {"direct_nvme": {"enabled": False}})


@pytest.mark.parametrize(
    "keys",
    [
        {},  # the script's own, which is looked at when it is there
        {"optimizer": {"type": "Adam"}},
        {"optimizer": {"type": "adamw", "params": {"torch_adam": False}}},
        {"optimizer": {"type": "auto"}},
    ],
)
def test_adam_may_have_bf16_states(keys: dict[str, Any]) -> None:
    check(BF16, **keys)
