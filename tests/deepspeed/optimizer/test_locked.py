"""Calls of the optimizer that use slots hold the lock; a script may make them in any hook."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from memascend.deepspeed.optimizer.locked import locked
from memascend.deepspeed.optimizer.restore import restore
from memascend.deepspeed.optimizer.swapper import StreamedSwapper
from memascend.memory.guard import Guard
from tests.support import streamed_gradients
from tests.support.tiled_optimizer import NAMES, Optimizer
from tests.support.tiled_training import gradients

FP32 = torch.float32
BOTH = {"write_opt_state": True, "write_gradients": True}


def watch(optimizer: Any) -> None:
    """Refuse every use of slots without the lock from now on."""
    guard = Guard(optimizer.attachment.runtime.lock)
    stream = optimizer.gradient_stream
    stream.guard = stream._slots.guard = guard


def test_a_method_holds_the_lock_while_it_runs_and_not_afterwards() -> None:
    lock = threading.RLock()
    guard = Guard(lock)

    class Owner:
        attachment: Any = SimpleNamespace(runtime=SimpleNamespace(lock=lock))

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


def set_part(optimizer: Optimizer, part: torch.Tensor) -> None:
    part.fill_(1.0)
    optimizer._writeback_swap_state(0, **BOTH)


def make_sub_group(optimizer: Optimizer) -> None:
    optimizer.groups.discard()
    optimizer._swap_in_sub_group_to_flat_buffer(None, 0)


def load(optimizer: Optimizer) -> None:
    optimizer.gradient_stream._slots.guard = None
    key = optimizer.groups.group(NAMES[0]).key()
    optimizer.gradient_stream._slots.write(key=key, source=torch.ones(1))
    watch(optimizer)
    restore(optimizer, {}, [])


def step(optimizer: Optimizer) -> None:
    """With a gradient in another dtype than the step's, which passes through slots."""
    optimizer._prepare_sub_group(0, None)
    optimizer.unscale_and_clip_grads(0, torch.tensor(0.0))
    optimizer._optimizer_step(0)


CALLS: dict[str, Callable[[Optimizer], object]] = {
    "reads a gradient": lambda one: one._get_fp32_grad_state_partition(None, True),
    "reads a state": lambda one: one._get_fp32_opt_state_partition(None, True),
    "sets a gradient": lambda one: set_part(
        one, one._get_fp32_grad_state_partition(None, False)[0]
    ),
    "sets a state": lambda one: set_part(one, one._get_fp32_opt_state_partition(None, False)[0]),
    "steps": step,
    "settles": lambda one: one.settle(),
    "loads": load,
    "makes a sub-group": make_sub_group,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_in_tiles_the_lock_is_held_where_slots_are_used(
    call: Callable[[Optimizer], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memascend.deepspeed.optimizer.restore.dist.get_rank", lambda: 0)
    optimizer = Optimizer(lambda parameters: torch.optim.Adam(parameters))
    for name, value in gradients(1, FP32).items():
        optimizer.gradient_stream.put(name, 0, value)
    watch(optimizer)
    call(optimizer)


def test_values_set_on_two_threads_at_once_are_both_stored() -> None:
    """Each hook reads, changes and writes back; the other one may begin in the middle."""
    optimizer = Optimizer(lambda parameters: torch.optim.Adam(parameters))
    both_have_read = threading.Barrier(2)

    def set_state(number: int) -> None:
        optimizer.get_param_id = lambda param: param  # type: ignore[method-assign]
        part, _ = optimizer._get_fp32_opt_state_partition(number, False)
        both_have_read.wait(60)
        part.fill_(number)
        optimizer._writeback_swap_state(0, **BOTH)

    optimizer.grad_position = {1: (0, 100, 6), 2: (0, 200, 6)}
    threads = [threading.Thread(target=set_state, args=[number]) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    master = optimizer.training.master(NAMES[0])
    assert [master[100:106].tolist(), master[200:206].tolist()] == [[1.0] * 6, [2.0] * 6]


def test_a_value_that_was_only_read_is_not_kept() -> None:
    optimizer = Optimizer(lambda parameters: torch.optim.Adam(parameters))
    optimizer._get_fp32_grad_state_partition(None, True)
    optimizer._get_fp32_opt_state_partition(None, True)
    assert optimizer._put_back.call is None


# -- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("streams_optimizer", [True, False])
def test_the_end_of_a_window_and_the_verdict_hold_the_lock(streams_optimizer: bool) -> None:
    optimizer = streamed_gradients.Optimizer(streams_optimizer=streams_optimizer)
    optimizer.is_last = False
    optimizer.arrive(0, 1, 2)
    watch(optimizer)
    optimizer._finalize_offload_gradient_accumulation()
    assert optimizer._verdict().isfinite().all()


def test_gradients_and_master_weights_of_the_flat_buffer_come_under_the_lock() -> None:
    optimizer = Optimizer(lambda parameters: torch.optim.Adam(parameters))
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
