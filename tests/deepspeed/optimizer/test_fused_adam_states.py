"""Moments in bf16: who may step them, and which random bits a step rounds them with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.ops.adam import DeepSpeedCPUAdam

from memascend.deepspeed.optimizer import fused_adam as module
from memascend.deepspeed.optimizer.fused_adam import MOMENTS, FusedAdam, fused_adam
from memascend.errors import ConfigError
from memascend.streaming.optimizer.tile_memory import TileShape
from tests.support.tiled_training import tile_shape

BF16 = torch.bfloat16
NUMEL = 5000
STATES = dict.fromkeys(MOMENTS, BF16)
FEWER = 'state_dtype="bf16"'


def shape(gradient: torch.dtype = BF16) -> TileShape:
    return tile_shape(state_dtype=BF16, gradient_dtype=gradient)


@pytest.fixture(autouse=True)
def _rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.dist, "get_rank", lambda: 0)


@pytest.fixture
def optimizer() -> DeepSpeedCPUAdam:
    return DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(1))], lr=1e-2, weight_decay=0.1)


def fused_of(optimizer: Any, rank: int = 0) -> FusedAdam:
    fused = fused_adam(optimizer, shape(), rank, fewer=FEWER)
    assert fused.is_fused
    return fused


def stepped(
    optimizer: Any,
    *,
    rank: int = 0,
    sub_group: int = 0,
    step: int = 1,
    cuts: tuple[int, ...] = (),
) -> list[torch.Tensor]:
    """The moments after a step of one sub-group, in tiles that end at `cuts`."""
    fused = fused_of(optimizer, rank)
    group = optimizer.param_groups[0]
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(NUMEL, generator=generator).to(BF16)
    moments = {name: torch.rand(NUMEL, generator=generator).to(BF16) for name in MOMENTS}
    weight = torch.randn(NUMEL, generator=generator)
    for begin, end in zip((0, *cuts), (*cuts, NUMEL), strict=True):
        values = {"step": step - 1} | {n: value[begin:end] for n, value in moments.items()}
        inputs = (group, values, STATES)
        update = fused.updates([inputs] * (sub_group + 1))[sub_group]
        assert update is not None
        update(
            begin=begin,
            gradient=gradient[begin:end],
            factor=1.0,
            weight=weight[begin:end],
            values=values,
            output=None,
        )
    return [weight, *moments.values()]


def test_tiles_do_not_show(optimizer: DeepSpeedCPUAdam) -> None:
    whole, cut = stepped(optimizer), stepped(optimizer, cuts=(1024, 4096))
    assert all(torch.equal(one, other) for one, other in zip(whole, cut, strict=True))


@pytest.mark.parametrize("changed", [{"rank": 1}, {"sub_group": 1}])
def test_every_rank_and_sub_group_rounds_with_bits_of_its_own(
    optimizer: DeepSpeedCPUAdam, changed: dict[str, int]
) -> None:
    (weight, *moments), (same, *others) = stepped(optimizer), stepped(optimizer, **changed)
    assert torch.equal(weight, same)  # stepped with what moments were before they were rounded
    for one, other in zip(moments, others, strict=True):
        assert 0.1 < (one != other).double().mean().item() < 0.6
        assert torch.allclose(one.float(), other.float(), rtol=2**-7)


def test_every_step_rounds_with_bits_of_its_own(optimizer: DeepSpeedCPUAdam) -> None:
    optimizer.param_groups[0]["bias_correction"] = False  # else other weights, same moments
    first, second = stepped(optimizer, step=1), stepped(optimizer, step=2)
    assert any(not torch.equal(one, other) for one, other in zip(first, second, strict=True))


# -- who may not ---------------------------------------------------------------------------------


def message_of(caught: pytest.ExceptionInfo[ConfigError]) -> str:
    message = str(caught.value)
    assert 'memascend.streaming.optimizer.state_dtype="bf16"' in message
    assert "leave state_dtype out" in message
    return message


def test_another_optimizer_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError) as caught:
        fused_adam(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]), shape(), fewer=FEWER)
    assert "torch.optim.adamw.AdamW" in message_of(caught)


def test_numbers_that_are_tensors_are_refused_at_the_start(optimizer: DeepSpeedCPUAdam) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(1e-3)
    with pytest.raises(ConfigError) as caught:
        fused_adam(optimizer, shape(), fewer=FEWER)
    assert "lr=0.001" in message_of(caught).replace("tensor(0.0010)", "0.001")


def test_a_step_that_somebody_watches_is_refused_at_the_start(optimizer: DeepSpeedCPUAdam) -> None:
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(ConfigError) as caught:
        fused_adam(optimizer, shape(), fewer=FEWER)
    assert "hooks" in message_of(caught)


def test_a_machine_whose_operator_gives_other_bits_is_refused(
    optimizer: DeepSpeedCPUAdam, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_tail_width", lambda *_, **__: None)
    with pytest.raises(ConfigError) as caught:
        fused_adam(optimizer, shape(), fewer=FEWER)
    assert "other bits" in message_of(caught)


def test_tiles_that_no_kernel_reads_are_refused(optimizer: DeepSpeedCPUAdam) -> None:
    with pytest.raises(ConfigError, match="no kernel"):
        fused_adam(optimizer, shape(gradient=torch.float64), fewer=FEWER)


def test_what_shows_later_is_refused_at_the_step(optimizer: DeepSpeedCPUAdam) -> None:
    fused = fused_of(optimizer)
    group = optimizer.param_groups[0]
    assert fused.updates([(group, {"step": 1}, STATES)]) != [None]
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(ConfigError) as caught:
        fused.updates([(group, {"step": 1}, STATES)])
    assert "hooks" in message_of(caught)
    handle.remove()
    with pytest.raises(ConfigError) as caught:
        fused.updates([(group | {"lr": torch.tensor(1.0)}, {"step": 1}, STATES)])
    assert "hyperparameters" in message_of(caught)
    with pytest.raises(ConfigError) as caught:
        fused.updates([(group, {"step": 1}, dict.fromkeys(MOMENTS, torch.float32))])
    assert "torch.float32" in message_of(caught)


def test_moments_in_bf16_that_the_block_did_not_ask_for_are_left_to_the_optimizer(
    optimizer: DeepSpeedCPUAdam,
) -> None:
    """As DeepSpeed keeps them, in a step that it makes itself."""
    fused = fused_adam(optimizer, shape())
    assert fused.is_fused
    group = optimizer.param_groups[0]
    assert fused.updates([(group, {"step": 1}, STATES)]) != [None]
    optimizer.register_step_pre_hook(lambda *_: None)
    assert fused.updates([(group, {"step": 1}, STATES)]) == [None]
