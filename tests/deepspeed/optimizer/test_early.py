"""Steps that begin during backward: what is early, what is forgotten, and what a run is told."""

from __future__ import annotations

import errno
import itertools
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from memascend.config.block import parse_block
from memascend.deepspeed.optimizer.fused_adam import fused_adam
from memascend.errors import GradientGoneError, StoreFullError
from memascend.nvme.store import MemoryFaults
from memascend.streaming.updates import early_key
from tests.support.streaming_hosts import memory_store
from tests.support.tiled_optimizer import NAMES, Optimizer, Swapper
from tests.support.tiled_training import SIZES, gradients, moved_gradients

pytestmark = pytest.mark.deepspeed

BF16 = torch.bfloat16
#: Those that hold anything of the first two members, of a third each.
TILES = sum(-(-(numel // 3 * 2) // 4096) for numel in SIZES.values())


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 0)


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
        spare_count=4,
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
    made.param_names = Names()
    made._set_up_early(made.training.tiles)
    return made


class Names:
    """Of parameters: their keys."""

    def __getitem__(self, param: Any) -> str:
        return str(param.key)


def backward(optimizer: Any, number: int, *, without: tuple[str, int] | None = None) -> None:
    """As the last micro-step gives gradients: of each member, from the last one on."""
    optimizer.runtime.walk.finish()
    for name, value in reversed(gradients(number, BF16).items()):
        for index, member in reversed(list(enumerate(optimizer.training.members[name]))):
            if (name, index) != without:
                give(optimizer, name, value[member.offset : member.offset + member.numel], member)


def give(optimizer: Any, name: str, value: torch.Tensor, member: Any) -> None:
    """As partition_grads gives one."""
    places = optimizer.tile_places(name, member.offset)
    accumulate = optimizer.micro_step_id != 0
    optimizer.spool.put(name, member.offset, value.clone(), accumulate=accumulate, places=places)
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
        optimizer._end_step()


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
def test_two_steps_are_watched_and_all_others_are_early(state_dtype: torch.dtype) -> None:
    early, late = make(state_dtype=state_dtype), make(early=False, state_dtype=state_dtype)
    for optimizer in (early, late):
        train(optimizer, range(5))
    assert early.early_tile_count == 3 * TILES
    assert late.early_tile_count == 0
    assert_equal(early, late)


def test_an_early_step_moves_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = make()
    moved = moved_gradients(optimizer.training, monkeypatch)
    train(optimizer, range(2))
    optimizer.finish_walk()
    assert moved
    moved.clear()
    train(optimizer, range(2, 4))
    optimizer.finish_walk()
    assert moved == []


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


CHANGES = [
    (change_rate, "lr of sub-group 0 went from 0.01 to 0.005 between backward and step()"),
    (grow_scale, "loss_scale of sub-group 0 went from 4.0 to 8.0"),
    (set_state, "a value was set between backward and step()"),
    (change_betas_in_place, "betas of sub-group 0 went from [0.9, 0.95] to [0.5, 0.95]"),
    (clip, "gradient_clipping of sub-group 0 went from 0.0 to 0.5"),
    (hook, "the optimizer has to make this step by itself"),
]


@pytest.mark.parametrize("change", [change for change, _ in CHANGES])
def test_what_changes_in_a_watched_step_counts_and_nothing_is_early_then(
    change: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    early, late = make(), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(1))
        backward(optimizer, 1)
        change(optimizer)
        step(optimizer)
        train(optimizer, range(2, 5))
    assert early.early_tile_count == 0
    assert_equal(early, late)


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_what_changes_later_is_refused_and_training_goes_on(
    change: Callable[[Any], None], words: str
) -> None:
    early, late = make(), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(3))
    assert_equal(early, late)
    backward(early, 3)
    change(early)
    with pytest.raises(GradientGoneError, match=re.escape(words)) as caught:
        step(early)
    assert '"during_backward": false' in str(caught.value)
    change(late)
    assert_equal(early, late)
    early.settle()  # as before a checkpoint
    for optimizer in (early, late):
        train(optimizer, range(3, 5))
    assert_equal(early, late)


def test_a_norm_that_is_not_finite_needs_no_gradient() -> None:
    early, late = make(), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(3))
        backward(optimizer, 3)
        change_rate(optimizer)
        step(optimizer, is_left_out=True)
        train(optimizer, range(4, 6))
    assert early.early_tile_count == 3 * TILES
    assert_equal(early, late)


def read_gradient(optimizer: Any) -> torch.Tensor:
    optimizer.grad_position = {0: (0, 0, SIZES[NAMES[0]] // 3)}
    gradient, _ = optimizer._get_fp32_grad_state_partition(None, False)
    return torch.as_tensor(gradient)


def test_gradients_that_a_script_reads_stay_on_the_drive(caplog: pytest.LogCaptureFixture) -> None:
    early, late = make(), make(early=False)
    with caplog.at_level(logging.WARNING, "memascend"):
        for number in range(4):
            for optimizer in (early, late):
                backward(optimizer, number)
            assert torch.equal(read_gradient(early), read_gradient(late))
            for optimizer in (early, late):
                step(optimizer)
    assert early.early_tile_count == 0
    assert_equal(early, late)


def test_a_gradient_that_is_read_too_late_is_refused_and_the_step_is_made() -> None:
    early, late = make(), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(2))
        backward(optimizer, 2)
    all_early(early)
    with pytest.raises(GradientGoneError, match="cannot read a gradient"):
        read_gradient(early)
    for optimizer in (early, late):
        step(optimizer)
        train(optimizer, range(3, 5))
    assert early.early_tile_count == 3 * TILES
    assert_equal(early, late)


@pytest.mark.parametrize("watched", [True, False])
def test_another_backward_pass_cannot_be_added_once_the_first_is_used_up(watched: bool) -> None:
    early, late = make(), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(1 if watched else 2))
        backward(optimizer, 2)
        optimizer.micro_step_id = 1
    backward(late, 3)
    if watched:
        backward(early, 3)
        for optimizer in (early, late):
            step(optimizer)
    else:
        with pytest.raises(GradientGoneError, match="another backward pass"):
            backward(early, 3)
        for optimizer in (early, late):  # as zero_grad
            optimizer.micro_step_id = 0
            train(optimizer, range(2, 3))
    for optimizer in (early, late):
        optimizer.micro_step_id = 0
        train(optimizer, range(4, 6))
    assert (early.early_tile_count == 0) == watched
    assert_equal(early, late)


def test_a_parameter_that_missed_a_watched_step_may_miss_another() -> None:
    early, late = make(), make(early=False)
    for number in range(8):
        for optimizer in (early, late):
            backward(optimizer, number, without=(NAMES[0], 1) if number in (1, 4, 5) else None)
            all_early(optimizer)
            step(optimizer)
    # Its own tiles, and the one that it shares.
    first = SIZES[NAMES[0]] // 3
    its = -(-2 * first // 4096) - first // 4096
    assert early.early_tile_count == 6 * (TILES - its)
    assert_equal(early, late)


def test_a_parameter_that_misses_a_step_for_the_first_time_is_named() -> None:
    early, late = make(), make(early=False)
    missing = (NAMES[0], 1)
    for optimizer in (early, late):
        train(optimizer, range(2))
        # What it has from a step that was watched is there.
        backward(optimizer, 2, without=missing)
        step(optimizer)
        train(optimizer, range(3, 4))
    assert_equal(early, late)
    other = (NAMES[1], 0)
    backward(early, 4, without=other)
    with pytest.raises(GradientGoneError, match=rf"parameter param.{other[0]}.0 got no gradient"):
        step(early)
    for optimizer in (early, late):
        train(optimizer, range(5, 7))
    assert_equal(early, late)


def test_a_step_without_a_backward_pass_is_refused() -> None:
    optimizer = make()
    train(optimizer, range(3))
    with pytest.raises(GradientGoneError, match="got no gradient this time"):
        step(optimizer)


def test_a_checkpoint_that_is_loaded_before_the_step_needs_another_backward_pass() -> None:
    early, late = make(), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(2))
        backward(optimizer, 2)
    early.begin_load()
    early.integrity.mend()
    with pytest.raises(GradientGoneError, match="a checkpoint was loaded"):
        step(early)
    for optimizer in (early, late):
        train(optimizer, range(2, 4))
    assert_equal(early, late)


def test_whatever_torch_makes_by_default_a_step_is_counted() -> None:
    early, late = make(), make(early=False)
    torch.set_default_dtype(BF16)
    try:
        for optimizer in (early, late):
            train(optimizer, range(3))
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
    write_back, calls = early.stream._write_back, itertools.count()

    def fail(tile: Any, *arguments: Any, **keywords: Any) -> None:
        faults.gone = errno.ENODEV if next(calls) == 1 else 0
        try:
            write_back(tile, *arguments, **keywords)
            tile.wait()
        finally:
            faults.gone = 0

    with monkeypatch.context() as patch:
        patch.setattr(early.stream, "_write_back", fail)
        backward(early, 2)
        all_early(early)
    with pytest.raises(GradientGoneError, match="could not be stepped during backward"):
        step(early)
    assert_equal(early, late)
    for optimizer in (early, late):
        train(optimizer, range(2, 6))
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
    assert early.early_tile_count == TILES
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
    assert early.early_tile_count == TILES
    assert_equal(early, late)


def test_a_step_that_is_left_out_changes_nothing() -> None:
    early, late = make(), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(2))
        train(optimizer, range(2, 3), is_left_out=True)
    assert_equal(early, late)
    for optimizer in (early, late):
        train(optimizer, range(3, 6))
    assert early.early_tile_count == 3 * TILES
    assert_equal(early, late)


def test_a_second_backward_pass_counts_and_the_first_does_not() -> None:
    early, late = make(), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(2))
        backward(optimizer, 2)
        change_rate(optimizer)  # as after zero_grad
        train(optimizer, range(3, 5))
    assert early.early_tile_count == 2 * TILES
    assert_equal(early, late)


def test_where_the_first_tile_fails_early_none_is(
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
    assert early.early_tile_count == TILES
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
            train(optimizer, range(1, 5))
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
) -> None:
    with caplog.at_level(logging.WARNING, "memascend"):
        optimizer = make(**changes)
    assert "streaming.optimizer.during_backward" in caplog.text
    assert words in caplog.text
    assert optimizer._early is None


def test_second_values_go_with_the_optimizer() -> None:
    optimizer = make()
    train(optimizer, range(3))
    optimizer.finish_walk()
    store = optimizer.runtime.store
    assert [key for key in store.keys() if key.startswith(early_key(""))]  # noqa: SIM118
    optimizer._discard(None)
    assert not [key for key in store.keys() if key.startswith(early_key(""))]  # noqa: SIM118
