"""Gradients of a ZeRO-3 optimizer, from a reduced partition to the norm and the verdict."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stock

from memascend.deepspeed.optimizer.gradients import FlatGradients
from tests.support.streamed_gradients import BF16, NUMELS, PLACES, Optimizer, Param

GRAD_PARTITIONS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


# -- streamed: what arrives ----------------------------------------------------------------------


def test_what_is_final_is_told_once_it_is_in_the_gradient_stream() -> None:
    optimizer = Optimizer()
    optimizer.is_last = False
    optimizer.arrive(0, 2)
    assert optimizer.final == []
    optimizer.is_last = True
    optimizer.arrive(1, 2)
    assert optimizer.final == [("0_1", PLACES[1][1]), ("2_2", PLACES[2][1])]


def test_a_gradient_goes_to_its_place_and_leaves_the_device() -> None:
    optimizer = Optimizer()
    optimizer.arrive(1, 2, value=3.0)
    assert optimizer.seen("0_1", 5030) == [0.0, 3.0]
    assert optimizer.seen("2_2", 700) == [3.0]
    assert [param.grad for param in optimizer.params] == [None] * 3


def test_a_part_that_is_all_padding_is_let_go() -> None:
    optimizer = Optimizer()
    optimizer.params[2] = Param(2, padding=700)
    optimizer.arrive(2)
    assert optimizer.params[2].grad is None
    assert optimizer.seen("2_2", 700) == [0.0]
    assert optimizer._offload_boundary_param_ids == set()


def test_a_gradient_is_taken_under_the_lock_of_the_data_paths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hooks of another device's thread may read parameters through the same slots meanwhile."""
    optimizer = Optimizer()
    free: list[bool] = []

    def try_lock() -> None:
        lock = optimizer.attachment.runtime.lock
        free.append(lock.acquire(blocking=False))

    put = optimizer.gradient_stream.put

    def watched(*arguments: Any, **keywords: Any) -> Any:
        other = threading.Thread(target=try_lock)
        other.start()
        other.join()
        return put(*arguments, **keywords)

    monkeypatch.setattr(optimizer.gradient_stream, "put", watched)
    optimizer.arrive(0, 1)
    assert free == [False, False]


def test_micro_steps_add_up_and_the_first_of_a_window_replaces() -> None:
    optimizer = Optimizer()
    for window in range(2):
        for micro_step in range(2):
            optimizer.micro_step_id, optimizer.is_last = micro_step, micro_step == 1
            optimizer.arrive(0, value=1.0 + window)
    assert optimizer.seen("0_1", 5000) == [4.0]


def test_the_norm_is_that_of_the_whole_window() -> None:
    optimizer = Optimizer()
    optimizer.is_last = False
    optimizer.arrive(2, value=1.0)
    assert optimizer.norm_for_param_grads == {}
    optimizer.micro_step_id, optimizer.is_last = 1, True
    optimizer.arrive(2, value=2.0)
    norm = optimizer.norm_for_param_grads[2]
    assert norm.dtype == torch.float64
    assert norm.item() == (700 * 9.0) ** 0.5


# -- streamed: who gets a finished one -----------------------------------------------------------


def test_in_tiles_the_step_finds_it_in_the_gradient_stream() -> None:
    optimizer = Optimizer(streams_optimizer=True)
    optimizer.arrive(1)
    assert optimizer.handed == []
    assert not optimizer.fp32_partitioned_groups_flat[0].grad.any()


def test_deepspeeds_swapper_gets_it_once_the_window_is_full() -> None:
    optimizer = Optimizer(streams_optimizer=False)
    optimizer.is_last = False
    optimizer.arrive(1)
    assert optimizer.handed == []
    optimizer.micro_step_id, optimizer.is_last = 1, True
    optimizer.arrive(1)
    assert optimizer.handed == [("0_1", [5000], [[2.0] * 30])]


def test_a_sub_group_too_small_for_the_drive_gets_it_in_memory() -> None:
    optimizer = Optimizer(streams_optimizer=False, on_drive=False)
    optimizer.arrive(1, value=5.0)
    assert optimizer.handed == []
    gradient = optimizer.fp32_partitioned_groups_flat[0].grad
    assert torch.unique_consecutive(gradient).tolist() == [0.0, 5.0]
    assert gradient.count_nonzero() == 30


# -- streamed: a window whose end was not known --------------------------------------------------


@pytest.mark.parametrize("streams_optimizer", [True, False])
def test_a_window_is_finished_with_what_has_arrived(streams_optimizer: bool) -> None:
    optimizer = Optimizer(streams_optimizer=streams_optimizer)
    optimizer.is_last = False
    optimizer.arrive(1, value=4.0)
    assert optimizer.seen("0_1", 5030) == [0.0]
    optimizer._finalize_offload_gradient_accumulation()
    assert optimizer.seen("0_1", 5030) == [0.0, 4.0]
    assert optimizer.norm_for_param_grads[1].item() == (30 * 16.0) ** 0.5
    expected = [] if streams_optimizer else [("0_1", [5000], [[4.0] * 30])]
    assert optimizer.handed == expected


def test_what_got_no_gradient_in_the_window_is_passed_by() -> None:
    optimizer = Optimizer()
    optimizer.arrive(0)
    optimizer._offload_boundary_param_ids = {2}  # announced, and nothing came
    optimizer.norm_for_param_grads.clear()
    optimizer._finalize_offload_gradient_accumulation()
    assert optimizer.norm_for_param_grads == {}
    optimizer.gradient_stream.set("2_2", 0, torch.full((700,), 6.0))  # by an accessor
    optimizer._finalize_offload_gradient_accumulation()
    assert optimizer.seen("2_2", 700) == [6.0]


# -- streamed: verdict and buffers ---------------------------------------------------------------


@pytest.mark.parametrize("value", [1.0, float("inf"), float("nan")])
def test_the_verdict_is_finite_exactly_if_every_gradient_is(value: float) -> None:
    optimizer = Optimizer()
    optimizer.arrive(0, 1)
    optimizer.arrive(2, value=value)
    verdict = optimizer._verdict()
    assert verdict.shape == (1,)
    assert torch.isfinite(verdict).item() == (value == 1.0)


@pytest.mark.parametrize(("streams_optimizer", "pins"), [(True, False), (False, True)])
def test_the_flat_buffer_takes_no_memory_and_is_pinned_only_for_whole_steps(
    streams_optimizer: bool, pins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, Any] = {}

    def set_up(self: Any) -> None:
        self.initialize_optimizer_states()
        buffer = torch.zeros(sum(NUMELS), dtype=BF16, device=OffloadDeviceEnum.cpu)
        found.update(nbytes=buffer.untyped_storage().nbytes(), numel=buffer.numel())
        found["pins"] = self.offload_optimizer_pin_memory
        self.grad_partitions_flat_buffer = buffer
        setattr(self, GRAD_PARTITIONS, {0: buffer})

    monkeypatch.setattr(Stock, "_setup_for_real_optimizer", set_up)
    monkeypatch.setattr(Stock, "initialize_optimizer_states", lambda self: None)
    optimizer = Optimizer(streams_optimizer=streams_optimizer)
    optimizer.offload_optimizer_pin_memory = True
    optimizer._setup_for_real_optimizer()
    assert found == {"nbytes": 2, "numel": sum(NUMELS), "pins": pins}
    assert optimizer.offload_optimizer_pin_memory
    assert optimizer.grad_partitions_flat_buffer is None
    assert getattr(optimizer, GRAD_PARTITIONS) == {}


def test_the_gradient_of_a_single_sub_group_in_memory_is_as_large_and_takes_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[torch.Tensor] = []

    def keep_zeros(self: Any) -> None:
        kept.append(torch.zeros(sum(NUMELS), device=OffloadDeviceEnum.cpu))

    def set_up(self: Any) -> None:
        self._create_fp32_partitions()
        self.initialize_optimizer_states()

    monkeypatch.setattr(Stock, "_setup_for_real_optimizer", set_up)
    monkeypatch.setattr(Stock, "_create_fp32_partitions", keep_zeros)
    monkeypatch.setattr(Stock, "initialize_optimizer_states", keep_zeros)
    optimizer = Optimizer(streams_optimizer=False, on_drive=False)
    optimizer.offload_optimizer_pin_memory = False
    optimizer._setup_for_real_optimizer()
    assert [tensor.untyped_storage().nbytes() for tensor in kept] == [4 * sum(NUMELS)] * 2


# -- flat ----------------------------------------------------------------------------------------


def flat(check: Any, gradients: torch.Tensor | None) -> Any:
    made: Any = FlatGradients.__new__(FlatGradients)
    made.attachment = SimpleNamespace(runtime=SimpleNamespace(overflow_check=check))
    made.grad_partitions_flat_buffer = gradients
    return made


@pytest.mark.parametrize("overflows", [True, False])
def test_the_check_looks_at_the_flat_buffer_and_one_element_stands_for_it(overflows: bool) -> None:
    looked_at: list[Any] = []
    gradients = torch.ones(100, dtype=BF16)
    verdict = flat(lambda found: looked_at.append(found) or overflows, gradients)._verdict()
    assert [found is gradients for found in looked_at] == [True]
    assert (verdict.shape, verdict.dtype) == ((1,), BF16)
    assert torch.isfinite(verdict).item() != overflows


def test_without_a_check_or_a_buffer_upstream_looks_itself() -> None:
    assert flat(None, torch.ones(2))._verdict() is None
    assert flat(lambda _: True, None)._verdict() is None


def test_the_flat_buffer_lies_in_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []

    @contextmanager
    def host_buffers(component: str) -> Iterator[None]:
        entered.append(component)
        yield
        entered.append("end")

    monkeypatch.setattr(Stock, "_setup_for_real_optimizer", lambda self: entered.append("stock"))
    made = flat(None, None)
    made.attachment = SimpleNamespace(host_buffers=host_buffers)
    made._setup_for_real_optimizer()
    assert entered == ["gradients", "stock", "end"]
