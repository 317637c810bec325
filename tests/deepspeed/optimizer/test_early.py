"""Steps that begin during backward: what is early, what is forgotten, and what a run is told."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from memascend.config.block import parse_block
from memascend.deepspeed.optimizer.fused_adam import fused_adam
from memascend.errors import StoreFullError
from memascend.nvme.store import MemoryFaults
from memascend.streaming.updates import early_key
from tests.support.streaming_hosts import memory_store
from tests.support.tiled_optimizer import NAMES, Optimizer, Swapper
from tests.support.tiled_training import SIZES, gradients

pytestmark = pytest.mark.deepspeed

BF16 = torch.bfloat16
#: Those that hold anything of the first two members, of a third each.
TILES = sum(-(-(numel // 3 * 2) // 4096) for numel in SIZES.values())


def make(
    *,
    early: bool = True,
    faults: MemoryFaults | None = None,
    state_dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Any:
    made: Any = Optimizer(
        lambda p: DeepSpeedCPUAdam(p, lr=1e-2, betas=[0.9, 0.95]),
        state_count=2,
        store=memory_store(faults),
        state_dtype=state_dtype,
    )
    made.keeps_bf16_states = state_dtype == BF16
    made.runtime.config = parse_block({"streaming": {"optimizer": {"during_backward": early}}})
    made._param_swapper = Swapper()
    made._fused = fused_adam(made.optimizer, made.training.tiles.shape)
    made.stream._take_over = made.runtime.store.take_over
    # Every parameter is on the drive.
    made.training.members = {name: made.training.members[name][:2] for name in NAMES}
    made.fp16_partitioned_groups_flat = [None] * len(NAMES)
    made.fp16_groups = [made._params(name) for name in NAMES]
    for param in (param for group in made.fp16_groups for param in group):
        param.ds_numel = param.ds_tensor.ds_numel
    made._get_param_partition_rank = lambda param: 0
    for name, value in changes.items():
        setattr(made, name, value)
    made._set_up_early()
    return made


def backward(optimizer: Any, number: int) -> None:
    """As the last micro-step gives gradients: of each member, from the last one on."""
    optimizer.runtime.walk.finish()
    for name, value in reversed(gradients(number, BF16).items()):
        for member in reversed(optimizer.training.members[name]):
            part = value[member.offset : member.offset + member.numel]
            optimizer.spool.put(name, member.offset, part.clone())
            optimizer.note_final(name, member.offset)


def step(optimizer: Any, *, is_left_out: bool = False) -> None:
    """As upstream steps, up to what it does last; or as where a norm is not finite."""
    try:
        if is_left_out:
            return
        for index in range(len(NAMES)):
            optimizer._prepare_sub_group(index, None)
            optimizer.unscale_and_clip_grads(index, torch.tensor(0.0))
            optimizer._optimizer_step(index)
        steps, optimizer._behind = optimizer._behind, None
        if steps:
            optimizer.integrity.note_change()
            optimizer.runtime.walk.start(steps, optimizer._places(), optimizer.stream.drain)
    finally:
        optimizer.forget_early()
        optimizer._is_early_over = False


def all_early(optimizer: Any) -> None:
    """Wait until every tile that can be early is."""
    optimizer.runtime.walk.run(lambda: None).result()


def values(optimizer: Any) -> list[torch.Tensor]:
    optimizer.finish_walk()
    found = []
    for name, parameter in zip(NAMES, optimizer.fp32_partitioned_groups_flat, strict=True):
        found.append(optimizer.training.parameter(name))
        states = (None, "exp_avg", "exp_avg_sq")
        found += [optimizer.training.master(name, state) for state in states]
        found.append(torch.tensor(optimizer.optimizer.state[parameter]["step"]))
    return found


def assert_equal(one: Any, other: Any) -> None:
    pairs = zip(values(one), values(other), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)


def train(optimizer: Any, numbers: range, **keywords: Any) -> None:
    for number in numbers:
        backward(optimizer, number)
        all_early(optimizer)
        step(optimizer, **keywords)


@pytest.mark.parametrize("state_dtype", [torch.float32, BF16])
def test_the_first_step_makes_the_states_and_all_others_are_early(
    state_dtype: torch.dtype,
) -> None:
    early, late = make(state_dtype=state_dtype), make(early=False, state_dtype=state_dtype)
    for optimizer in (early, late):
        train(optimizer, range(4))
    assert early.early_tile_count == 3 * TILES
    assert late.early_tile_count == 0
    assert_equal(early, late)


def change_rate(optimizer: Any) -> None:
    optimizer.optimizer.param_groups[0]["lr"] *= 0.5


def grow_scale(optimizer: Any) -> None:
    optimizer.loss_scaler.cur_scale *= 2


def set_state(optimizer: Any) -> None:
    value, _ = optimizer._get_fp32_opt_state_partition(None, False, "exp_avg")
    value.fill_(3.0)
    optimizer._writeback_swap_state(0)


def change_betas_in_place(optimizer: Any) -> None:
    optimizer.optimizer.param_groups[0]["betas"][0] = 0.5


def clip(optimizer: Any) -> None:
    optimizer.clip_grad = 0.5


def hook(optimizer: Any) -> None:
    optimizer.optimizer.register_step_pre_hook(lambda *_: None)


@pytest.mark.parametrize(
    "change", [change_rate, grow_scale, set_state, change_betas_in_place, clip, hook]
)
def test_what_changes_between_backward_and_step_counts(change: Callable[[Any], None]) -> None:
    early, late = make(), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(2))
        count = optimizer.early_tile_count
        backward(optimizer, 2)
        change(optimizer)
        step(optimizer)
        assert optimizer.early_tile_count == count
        train(optimizer, range(3, 5))
    may_go_on = change not in (clip, hook)
    assert early.early_tile_count == (3 if may_go_on else 1) * TILES
    assert_equal(early, late)


def test_whatever_torch_makes_by_default_a_step_is_counted() -> None:
    early, late = make(), make(early=False)
    torch.set_default_dtype(BF16)
    try:
        for optimizer in (early, late):
            train(optimizer, range(2))
            optimizer.finish_walk()
    finally:
        torch.set_default_dtype(torch.float32)
    assert early.early_tile_count == TILES
    assert_equal(early, late)


def test_a_write_that_failed_early_is_not_read_by_later_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults = MemoryFaults()
    early, late = make(faults=faults), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(2))
    write_back = early.stream._write_back

    def fail(tile: Any, *arguments: Any, **keywords: Any) -> None:
        faults.gone = errno.ENODEV
        try:
            write_back(tile, *arguments, **keywords)
            tile.wait()
        finally:
            faults.gone = 0

    with monkeypatch.context() as patch:
        patch.setattr(early, "note_final", lambda name, offset: None)
        backward(early, 2)
        early.attachment.runtime.staging.wait_writes()
    with monkeypatch.context() as patch:
        patch.setattr(early.stream, "_write_back", fail)
        for name in NAMES:
            for member in early.training.members[name]:
                early.note_final(name, member.offset)
        all_early(early)
    step(early)
    train(late, range(2, 3))
    assert_equal(early, late)
    for optimizer in (early, late):
        train(optimizer, range(3, 6))
    assert early.early_tile_count == 4 * TILES
    assert_equal(early, late)


def test_without_a_thread_the_step_comes_after_backward(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    early, late = make(), make(early=False)

    def refuse(function: Any) -> None:
        raise RuntimeError("can't start new thread")

    for optimizer in (early, late):
        train(optimizer, range(2))
        with monkeypatch.context() as patch:
            if optimizer is early:
                patch.setattr(early._early, "_run", refuse)
            backward(optimizer, 2)
            with caplog.at_level(logging.WARNING, "memascend"):
                step(optimizer)
        train(optimizer, range(3, 4))
    assert "can't start new thread" in caplog.text
    assert early.early_tile_count == 2 * TILES
    assert_equal(early, late)


def test_values_may_be_looked_at_in_the_middle_of_backward() -> None:
    early, late = make(), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(2))
        note_final, seen = optimizer.note_final, []

        def look(
            name: str, offset: int, optimizer: Any = optimizer, note: Any = note_final
        ) -> None:
            note(name, offset)
            if not seen:  # noqa: B023  of this turn
                seen.append(values(optimizer))  # noqa: B023

        optimizer.note_final = look
        backward(optimizer, 2)
        optimizer.note_final = note_final
        step(optimizer)
    assert_equal(early, late)


def test_who_looks_at_values_before_the_step_sees_those_before() -> None:
    early, late = make(), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(2))
        backward(optimizer, 2)
    all_early(early)
    assert_equal(early, late)
    for optimizer in (early, late):
        optimizer.settle()
        step(optimizer)
    assert early.early_tile_count == 2 * TILES
    assert_equal(early, late)


def test_a_step_that_is_left_out_changes_nothing() -> None:
    early, late = make(), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(2))
        train(optimizer, range(2, 3), is_left_out=True)
    assert_equal(early, late)
    for optimizer in (early, late):
        train(optimizer, range(3, 6))
    assert_equal(early, late)


def test_a_second_backward_pass_counts_and_the_first_does_not() -> None:
    early, late = make(), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(2))
        backward(optimizer, 2)
        train(optimizer, range(3, 5))
    assert_equal(early, late)


def test_a_tile_that_fails_early_is_stepped_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    early, late = make(), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(2))
    with monkeypatch.context() as patch:

        def fail(*_: Any) -> None:
            raise OSError("the drive is gone")

        patch.setattr(early.stream, "step_early", fail)
        backward(early, 2)
        all_early(early)
    with caplog.at_level(logging.WARNING, "memascend"):
        step(early)
    assert "the drive is gone" in caplog.text
    train(late, range(2, 3))
    for optimizer in (early, late):
        train(optimizer, range(3, 4))
    assert early.early_tile_count == 2 * TILES
    assert_equal(early, late)


def test_without_room_for_second_values_nothing_is_early(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    early, late = make(), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(1))
    reserve = early.runtime.store.reserve

    def refuse(*, key: str, nbytes: int) -> None:
        if key == early_key(f"state.{NAMES[1]}.exp_avg"):
            raise StoreFullError(28, "no room")
        reserve(key=key, nbytes=nbytes)

    monkeypatch.setattr(early.runtime.store, "reserve", refuse)
    with caplog.at_level(logging.WARNING, "memascend"):
        for optimizer in (early, late):
            train(optimizer, range(1, 4))
    assert caplog.text.count("during_backward") == 1
    assert early.early_tile_count == 0
    assert not [key for key in early.runtime.store.keys() if key.startswith(early_key(""))]  # noqa: SIM118
    assert_equal(early, late)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clip_grad": 1.0}, "gradient_clipping is 1.0"),
        ({"_fused": None}, "fused"),
        ({"streams_gradients": False}, "not streamed"),
    ],
)
def test_where_it_cannot_be_the_run_is_told(
    changes: dict[str, Any],
    words: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 0)
    with caplog.at_level(logging.WARNING, "memascend"):
        optimizer = make(**changes)
    assert "streaming.optimizer.during_backward" in caplog.text
    assert words in caplog.text
    assert optimizer._early is None


def test_second_values_go_with_the_optimizer() -> None:
    optimizer = make()
    train(optimizer, range(2))
    optimizer.finish_walk()
    store = optimizer.runtime.store
    assert [key for key in store.keys() if key.startswith(early_key(""))]  # noqa: SIM118
    optimizer._discard(None)
    assert not [key for key in store.keys() if key.startswith(early_key(""))]  # noqa: SIM118
