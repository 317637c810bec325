"""Steps that go on behind their caller: the same values, and nobody sees a half of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from memascend.config.block import parse_block
from memascend.deepspeed.optimizer.fused_adam import fused_adam
from memascend.errors import StoreError, TornStepError
from memascend.streaming.optimizer.updates import SubGroupStep
from tests.support.tiled_optimizer import NAMES, Optimizer, Swapper
from tests.support.tiled_training import SIZES, gradients, lose_drive_at

pytestmark = pytest.mark.deepspeed

BF16 = torch.bfloat16


def make(*, overlap: bool = True) -> Any:
    made: Any = Optimizer(lambda p: DeepSpeedCPUAdam(p, lr=1e-2), state_count=2)
    made.runtime.config = parse_block({"streaming": {"optimizer": {"overlap": overlap}}})
    made._param_swapper = Swapper()
    made._fused = fused_adam(made.optimizer, made.training.tiles.shape)
    # Every parameter is on the drive or in host memory on its own.
    made.fp16_partitioned_groups_flat = [None] * len(NAMES)
    made.fp16_groups = [made._params(name) for name in NAMES]
    return made


def step(optimizer: Any, number: int) -> None:
    """As upstream steps, up to what it does last."""
    optimizer.finish_walk()
    for name, value in gradients(number, BF16).items():
        optimizer.gradient_stream.put(name, 0, value)
    for index in range(len(NAMES)):
        optimizer._prepare_sub_group(index, None)
        optimizer.unscale_and_clip_grads(index, torch.tensor(0.0))
        optimizer._optimizer_step(index)
    optimizer._start_walk()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An optimizer whose second sub-group waits until it is told to go on."""
    optimizer = make()
    may_go = optimizer.may_go = threading.Event()
    stepped = optimizer.stream.step

    def hold(step: SubGroupStep, *arguments: Any) -> None:
        if step.name == NAMES[1]:
            assert may_go.wait(30)
        stepped(step, *arguments)

    monkeypatch.setattr(optimizer.stream, "step", hold)
    yield optimizer
    may_go.set()
    optimizer.runtime.background.finish()


def values(optimizer: Any) -> list[torch.Tensor]:
    optimizer.finish_walk()
    found = []
    for name in NAMES:
        found.append(optimizer.training.parameter(name))
        found += [optimizer.training.master(name, state) for state in (None, "exp_avg")]
    return found


def test_behind_the_caller_or_not_the_values_are_equal() -> None:
    behind, at_once = make(), make(overlap=False)
    for number in range(4):
        rate = 1e-2 / (number + 1)
        for optimizer in (behind, at_once):
            optimizer.optimizer.param_groups[0]["lr"] = rate
            step(optimizer, number)
            assert optimizer.runtime.background.is_under_way == (optimizer is behind)
            optimizer.optimizer.param_groups[0]["lr"] = 1e9  # as a scheduler, before the next step
    pairs = zip(values(behind), values(at_once), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_what_is_stepped_first_can_be_read_while_the_rest_goes_on(held: Any) -> None:
    at_once = make(overlap=False)
    step(at_once, 0)
    step(held, 0)
    walk = held.runtime.background
    walk.wait_for([f"param.{NAMES[0]}.0", f"param.{NAMES[0]}.1"])
    assert not walk.has_passed(f"param.{NAMES[1]}.0")
    parts = []
    for member in held.training.members[NAMES[0]][:2]:
        parts.append(torch.empty(member.numel, dtype=BF16))
        held.training.store.read(key=member.key, target=parts[-1]).wait()
    found = torch.cat(parts)
    assert torch.equal(found, at_once.training.parameter(NAMES[0])[: found.numel()])
    assert walk.is_under_way


def test_what_every_layer_needs_a_part_of_is_stepped_first(held: Any) -> None:
    """Norms and biases, which a Trainer gives a group of their own behind all others."""
    step(held, 0)
    walk = held.runtime.background
    walk.wait_for([f"param.{NAMES[2]}.0"])
    walk.wait_for([f"param.{NAMES[0]}.1"])
    assert not walk.has_passed(f"param.{NAMES[1]}.0")


def test_other_groups_are_walked_in_the_order_of_their_parameters() -> None:
    optimizer = make()
    optimizer.fp16_groups.reverse()
    first, last = (optimizer.fp16_groups[number][0].ds_id for number in (2, 1))
    assert first < last
    assert optimizer._forward_order() == [0, 2, 1]


def test_what_is_about_as_large_as_all_others_keeps_its_place() -> None:
    optimizer = make()
    optimizer.fp16_groups = [
        [SimpleNamespace(ds_id=number, ds_tensor=SimpleNamespace(ds_numel=9 + 2 * (number % 2)))]
        for number in range(100)
    ]
    assert optimizer._forward_order() == [*range(100)]


def test_where_betas_differ_the_order_is_that_of_the_optimizer() -> None:
    """It has one running power of each for all."""
    behind, at_once = make(), make(overlap=False)
    for optimizer in (behind, at_once):
        (group,) = optimizer.optimizer.param_groups
        optimizer.optimizer.param_groups.append({**group, "betas": (0.8, 0.99), "params": []})
        optimizer.sub_group_to_group_id = {0: 0, 1: 1, 2: 0}
    for number in range(10):
        for optimizer in (behind, at_once):
            step(optimizer, number)
            assert optimizer.runtime.background.is_under_way == (optimizer is behind)
    pairs = zip(values(behind), values(at_once), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def _set_weight(optimizer: Any) -> None:
    optimizer._get_fp32_opt_state_partition(None, False)
    assert optimizer.runtime.background.is_under_way
    optimizer._writeback_swap_state()


@pytest.mark.parametrize(
    "look",
    [
        lambda optimizer: optimizer.settle(),
        lambda optimizer: optimizer.begin_load(),
        lambda optimizer: optimizer.reset_swap_buffers(),
        _set_weight,
    ],
)
def test_who_looks_at_all_values_or_changes_one_waits_for_all(held: Any, look: Any) -> None:
    step(held, 0)
    threading.Timer(0.05, held.may_go.set).start()
    look(held)
    assert not held.runtime.background.is_under_way


@pytest.mark.parametrize(
    "look",
    [
        lambda optimizer: optimizer._get_fp32_opt_state_partition(None, False)[0],
        lambda optimizer: optimizer._get_fp32_opt_state_partition(None, False, "exp_avg")[0],
        lambda optimizer: optimizer._get_fp32_grad_state_partition(None, False)[0],
    ],
)
def test_who_looks_at_one_value_waits_for_its_sub_group_alone(held: Any, look: Any) -> None:
    at_once = make(overlap=False)
    for number in range(2):  # of the first step states begin as one value
        for optimizer in (at_once, held):
            held.may_go.set()
            optimizer.finish_walk()
            held.may_go.clear()
            step(optimizer, number)
        assert torch.equal(look(held), look(at_once))
        walk = held.runtime.background
        assert not walk.has_passed(f"param.{NAMES[1]}.0")
    at_once.grad_position = held.grad_position = {0: (1, 0, 6)}
    threading.Timer(0.05, held.may_go.set).start()
    assert torch.equal(look(held), look(at_once))
    assert walk.has_passed(f"param.{NAMES[1]}.0")


def test_who_looks_at_one_value_gets_the_error_of_a_step_that_failed_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = make()
    lose_drive_at(1, optimizer.stream, monkeypatch)
    step(optimizer, 0)
    optimizer.grad_position = {0: (2, 0, 6)}
    with pytest.raises(StoreError, match="the drive is gone"):
        optimizer._get_fp32_opt_state_partition(None, False)
    with pytest.raises(StoreError, match="the drive is gone"):
        optimizer.finish_walk()


def test_an_error_comes_up_once_and_the_step_counts_as_torn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = make()
    lose_drive_at(3, optimizer.stream, monkeypatch)
    step(optimizer, 0)
    with pytest.raises(StoreError, match="the drive is gone"):
        optimizer.runtime.background.wait_for([f"param.{NAMES[1]}.0"])
    with pytest.raises(StoreError, match="the drive is gone"):
        optimizer.finish_walk()
    with pytest.raises(TornStepError):
        optimizer.settle()


def test_a_step_whose_first_read_fails_counts_as_torn_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = make()

    def fail(*_: Any, **__: Any) -> None:
        raise StoreError(5, "the drive is gone")

    monkeypatch.setattr(optimizer.stream, "_due", fail)
    step(optimizer, 0)
    with pytest.raises(StoreError):
        optimizer.finish_walk()
    with pytest.raises(TornStepError):
        optimizer.integrity.check()


def test_a_load_takes_over_whatever_the_walk_failed_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = make()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("not of the drive")

    monkeypatch.setattr(optimizer.stream, "_write_back", fail)
    step(optimizer, 0)
    optimizer.begin_load()
    assert optimizer.integrity.is_torn
    assert not optimizer.runtime.background.is_under_way


def test_a_step_that_needs_more_than_tiles_is_over_first() -> None:
    optimizer = make()
    for name, numel in SIZES.items():  # set by the script, in fp32: goes through staging slots
        optimizer.gradient_stream.set(name, 0, torch.ones(numel))
    for index in range(len(NAMES)):
        optimizer._prepare_sub_group(index, None)
        optimizer.unscale_and_clip_grads(index, torch.tensor(0.0))
        assert optimizer._behind is None
        optimizer._optimizer_step(index)
    optimizer.stream.drain()


@pytest.mark.parametrize("attribute", ["streams_gradients", "_param_swapper", "_fused"])
def test_where_others_keep_the_values_a_step_is_over_first(attribute: str) -> None:
    optimizer = make()
    for other in range(len(NAMES)):
        optimizer._make_state(other)
    optimizer._updates = [optimizer._fused_update(other) for other in range(len(NAMES))]
    assert optimizer._may_go_behind()
    setattr(optimizer, attribute, None)
    optimizer._updates = [optimizer._fused_update(other) for other in range(len(NAMES))]
    assert not optimizer._may_go_behind()
