"""Steps in tiles whose moments are in bf16: what is stored, and what an accessor gives."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.ops.adam import DeepSpeedCPUAdam

from memascend.checkpoint.files import TensorReader
from memascend.checkpoint.source import LoadedTensor
from memascend.deepspeed.optimizer import restore as restoring
from memascend.deepspeed.optimizer import tiled
from memascend.deepspeed.optimizer.fused_adam import MOMENTS
from memascend.errors import ConfigError
from memascend.runtime import Runtime
from tests.support.tiled_optimizer import BF16, NAMES, Tiled, stock_unused
from tests.support.tiled_training import SIZES, gradients

FP32 = torch.float32
BLOCK = {"streaming": {"optimizer": {"state_dtype": "bf16"}}}


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled.dist, "get_rank", lambda: 0)


def adam(params: Any) -> DeepSpeedCPUAdam:
    return DeepSpeedCPUAdam(params, lr=1e-2, weight_decay=0.1)


def optimizer_of(state_dtype: torch.dtype = BF16, **options: Any) -> Tiled:
    block = BLOCK if state_dtype == BF16 else {}
    return Tiled(adam, block=block, state_dtype=state_dtype, **options)


def values_of(optimizer: Tiled) -> list[torch.Tensor]:
    states = (None, *MOMENTS)
    return [optimizer.training.master(name, state) for name in NAMES for state in states]


def test_moments_are_stored_in_bf16_and_near_those_in_fp32() -> None:
    narrow, wide = optimizer_of(), optimizer_of(FP32)
    for step in range(5):
        for optimizer in (narrow, wide):
            optimizer.walk(gradients(step, BF16))
    for name in NAMES:
        dtypes = {state: dtype for state, dtype, _ in narrow.steps.stored(name)}
        assert dtypes == {None: FP32, **dict.fromkeys(MOMENTS, BF16)}
        for state in (None, *MOMENTS):
            ours, theirs = (each.training.master(name, state) for each in (narrow, wide))
            assert torch.allclose(ours, theirs, rtol=0.1, atol=0.02), (name, state)
            assert SIZES[name] < 100 or not torch.equal(ours, theirs)


@pytest.mark.parametrize(("tile_numel", "tile_count"), [(8192, 2), (24_576, 1)])
def test_size_and_number_of_tiles_do_not_show(tile_numel: int, tile_count: int) -> None:
    both = [optimizer_of(), optimizer_of(tile_numel=tile_numel, tile_count=tile_count)]
    for step in range(3):
        for optimizer in both:
            optimizer.walk(gradients(step, BF16))
    for ours, theirs in zip(*map(values_of, both), strict=True):
        assert torch.equal(ours, theirs)


def test_a_step_with_hooks_is_refused_before_a_weight_changes() -> None:
    optimizer = optimizer_of()
    optimizer.walk(gradients(0, BF16))
    before = values_of(optimizer)
    optimizer.base.register_step_post_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="state_dtype"):
        optimizer.walk(gradients(1, BF16))
    for value, found in zip(before, values_of(optimizer), strict=True):
        assert torch.equal(value, found)


def test_an_accessor_gives_fp32_and_takes_it_rounded_to_nearest() -> None:
    optimizer = optimizer_of()
    optimizer.walk(gradients(0, BF16))
    value, _ = optimizer.steps.values.state(None, False, "exp_avg", stock_unused)
    expected = optimizer.training.master(NAMES[0], "exp_avg")
    assert value.dtype == FP32
    assert torch.equal(value, expected[100:106])
    value.copy_(torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1.003, 0.0, 1e-30, 7.0]))
    optimizer.steps.values.put_back(stock_unused)
    found = optimizer.training.master(NAMES[0], "exp_avg")
    assert torch.equal(found[100:106], value.to(BF16).float())
    assert torch.equal(found[:100], expected[:100])
    assert torch.equal(found[106:], expected[106:])


def test_the_block_decides_what_tiles_hold_and_rank_0_says_it_is_inexact(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for rank in (1, 0):
        assert "state_dtype" not in caplog.text
        monkeypatch.setattr(tiled.dist, "get_rank", lambda rank=rank: rank)
        optimizer = Tiled(adam, block=BLOCK)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert ["state_dtype" in record.getMessage() for record in warnings] == [True]
    assert optimizer.steps.asked_dtype == "bf16"
    assert optimizer.shape.state_dtype == BF16


@pytest.mark.parametrize(("follows", "kept"), [(False, FP32), (True, BF16)])
def test_states_that_deepspeed_keeps_in_bf16_are_no_request_for_ours(
    follows: bool, kept: torch.dtype
) -> None:
    """bf16_master_weights_and_grads, alone or with bf16_optimizer_states: its own step serves."""
    optimizer = Tiled(lambda params: DeepSpeedCPUAdam(params, fp32_optimizer_states=not follows))
    optimizer.stage3.master_weights_and_grads_dtype = BF16
    runtime: Any = optimizer.runtime
    runtime.open_optimizer = functools.partial(Runtime.open_optimizer, runtime)
    optimizer.steps.configure(None, None)
    shape = runtime._optimizer.tiles.shape
    assert (shape.master_dtype, shape.state_dtype) == (BF16, kept)
    assert not optimizer.steps._fused.is_fused
    assert optimizer.steps.asked_dtype == "fp32"


def test_another_optimizer_is_refused_when_tiles_are_made() -> None:
    with pytest.raises(ConfigError, match="AdamW"):
        Tiled(torch.optim.AdamW, block=BLOCK)


# -- checkpoints of the other kind ---------------------------------------------------------------


@pytest.mark.parametrize(("saved", "kept"), [(FP32, BF16), (BF16, FP32), (BF16, BF16)])
def test_moments_are_loaded_into_what_the_run_keeps(
    saved: torch.dtype,
    kept: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(restoring.dist, "get_rank", lambda: 0)
    caplog.set_level("INFO", logger="memascend")
    optimizer = optimizer_of(kept)
    moments = {
        (name, state): torch.rand(SIZES[name]).to(saved) for name in NAMES for state in MOMENTS
    }
    loaded = [
        LoadedTensor(index, state, saved, TensorReader(lambda v=moments[name, state]: v))
        for index, name in enumerate(NAMES)
        for state in MOMENTS
    ]
    for parameter in optimizer.masters:
        optimizer.base.state[parameter] = {"step": 3}
    for tensor in restoring._as_kept(optimizer.upstream, optimizer.steps, loaded):
        optimizer.steps.load_tensor(tensor)
    for (name, state), value in moments.items():
        assert torch.equal(optimizer.training.master(name, state), value.to(kept).float())
    assert caplog.text.count("Adam's moments are in another dtype") == (saved != kept)
    optimizer.steps.mend()
    optimizer.walk(gradients(0, BF16))
    for name in NAMES:
        assert optimizer.groups.group(name).states == dict.fromkeys(MOMENTS, kept)
