"""Calls of the optimizer that use slots hold the lock; a script may make them in any hook."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from memascend.checkpoint.source import CheckpointSource
from memascend.deepspeed.optimizer.checkpoint import CheckpointHooks, Loads
from memascend.deepspeed.optimizer.locked import locked
from memascend.deepspeed.optimizer.swapper import StreamedSwapper
from memascend.memory.guard import Guard
from tests.support import streamed_gradients
from tests.support.runtimes import stand_in
from tests.support.tiled_optimizer import NAMES, Tiled, stock_unused
from tests.support.tiled_training import gradients

FP32 = torch.float32


def watch(optimizer: Any) -> None:
    """Refuse every use of slots without the lock from now on."""
    guard = Guard(optimizer.lock)
    stream = optimizer.gradient_stream
    stream.guard = stream._slots.guard = guard


def test_a_method_holds_the_lock_while_it_runs_and_not_afterwards() -> None:
    lock = threading.RLock()
    guard = Guard(lock)

    class Owner:
        runtime: Any = stand_in(lock)

        @locked
        def call(self, number: int, *, more: int) -> int:
            """Adds."""
            guard.expect_held("call")
            return number + more

    assert Owner().call(3, more=4) == 7
    assert Owner.call.__doc__ == "Adds."
    with pytest.raises(AssertionError):
        guard.expect_held("call")


# -- in tiles ------------------------------------------------------------------------------------


def set_part(optimizer: Tiled, part: torch.Tensor) -> None:
    part.fill_(1.0)
    optimizer.steps.values.put_back(stock_unused)


def make_sub_group(optimizer: Tiled) -> None:
    optimizer.groups.discard()
    optimizer.steps.create_master(0, stock_unused)


def load(optimizer: Tiled) -> None:
    optimizer.gradient_stream._slots.guard = None
    key = optimizer.groups.group(NAMES[0]).key()
    optimizer.gradient_stream._slots.write(key=key, source=torch.ones(1))
    watch(optimizer)
    source = CheckpointSource(zero_states={}, optimizer_states={}, tensors=[])
    attachment: Any = SimpleNamespace(runtime=optimizer.runtime)
    optimizer.stage3.reset_swap_buffers = lambda: None
    optimizer.stage3._partition_all_parameters = lambda: None
    hooks = CheckpointHooks(optimizer.upstream, lambda: attachment, optimizer.steps)
    with hooks.active(source, loads=Loads.WEIGHTS):
        hooks.restore()


def step(optimizer: Tiled) -> None:
    """With a gradient in another dtype than the step's, which passes through slots."""
    optimizer.steps.prepare(0, stock_unused)
    optimizer.steps.unscale(0, torch.tensor(0.0), stock_unused)
    optimizer.steps.step_sub_group(0, optimizer._step_base(0))


CALLS: dict[str, Callable[[Tiled], object]] = {
    "reads a gradient": lambda one: one.steps.values.gradient(None, True, stock_unused),
    "reads a state": lambda one: one.steps.values.state(None, True, None, stock_unused),
    "sets a gradient": lambda one: set_part(
        one, one.steps.values.gradient(None, False, stock_unused)[0]
    ),
    "sets a state": lambda one: set_part(
        one, one.steps.values.state(None, False, None, stock_unused)[0]
    ),
    "steps": step,
    "settles": lambda one: one.steps.settle(),
    "loads": load,
    "makes a sub-group": make_sub_group,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_in_tiles_the_lock_is_held_where_slots_are_used(
    call: Callable[[Tiled], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memascend.deepspeed.optimizer.restore.dist.get_rank", lambda: 0)
    optimizer = Tiled(lambda parameters: torch.optim.Adam(parameters))
    for name, value in gradients(1, FP32).items():
        optimizer.gradient_stream.put(name, 0, value)
    watch(optimizer)
    call(optimizer)


def test_values_set_on_two_threads_at_once_are_both_stored() -> None:
    """Each hook reads, changes and writes back; the other one may begin in the middle."""
    optimizer = Tiled(lambda parameters: torch.optim.Adam(parameters))
    both_have_read = threading.Barrier(2)

    def set_state(number: int) -> None:
        part, _ = optimizer.steps.values.state(number, False, None, stock_unused)
        both_have_read.wait(60)
        part.fill_(number)
        optimizer.steps.values.put_back(stock_unused)

    optimizer.stage3.get_param_id = lambda param: param
    optimizer.stage3.grad_position = {1: (0, 100, 6), 2: (0, 200, 6)}
    threads = [threading.Thread(target=set_state, args=[number]) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    master = optimizer.training.master(NAMES[0])
    assert [master[100:106].tolist(), master[200:206].tolist()] == [[1.0] * 6, [2.0] * 6]


def test_a_value_that_was_only_read_is_not_kept() -> None:
    optimizer = Tiled(lambda parameters: torch.optim.Adam(parameters))
    optimizer.steps.values.gradient(None, True, stock_unused)
    optimizer.steps.values.state(None, True, None, stock_unused)
    assert optimizer.steps.values._put_back.call is None


# -- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_tiled", [True, False])
def test_the_end_of_a_window_and_the_verdict_hold_the_lock(is_tiled: bool) -> None:
    optimizer = streamed_gradients.Gradients(is_tiled=is_tiled)
    optimizer.is_last = False
    optimizer.arrive(0, 1, 2)
    watch(optimizer)
    optimizer.path.end_window(stock_unused)
    assert optimizer.path.verdict().isfinite().all()


def test_gradients_and_master_weights_of_the_flat_buffer_come_under_the_lock() -> None:
    optimizer = Tiled(lambda parameters: torch.optim.Adam(parameters))
    swapper = StreamedSwapper(
        groups=optimizer.groups,
        gradient_stream=optimizer.gradient_stream,
        lock=optimizer.runtime.lock,
    )
    watch(optimizer)
    swapper.swap_out_gradients(SimpleNamespace(ds_id=NAMES[0]), [0], [torch.ones(5)])
    new: Any = SimpleNamespace(ds_id="10_12")
    swapper.initialize_parameters([new], [torch.ones(5000)])
    assert optimizer.groups.contains("10_12")
