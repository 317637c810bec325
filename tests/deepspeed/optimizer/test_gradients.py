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

from memascend.deepspeed.optimizer.gradients import FlatGradients
from memascend.deepspeed.optimizer.upstream import Upstream
from tests.support.streamed_gradients import (
    BF16,
    NUMELS,
    PLACES,
    Gradients,
    Param,
    stock_unused,
)

GRAD_PARTITIONS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


# -- streamed: what arrives ----------------------------------------------------------------------


def test_what_is_final_is_told_once_it_is_in_the_gradient_stream() -> None:
    optimizer = Gradients()
    optimizer.is_last = False
    optimizer.arrive(0, 2)
    assert optimizer.steps.final == []
    optimizer.is_last = True
    optimizer.arrive(1, 2)
    assert optimizer.steps.final == [("0_1", PLACES[1][1]), ("2_2", PLACES[2][1])]


def test_a_gradient_goes_to_its_place_and_leaves_the_device() -> None:
    optimizer = Gradients()
    optimizer.arrive(1, 2, value=3.0)
    assert optimizer.seen("0_1", 5030) == [0.0, 3.0]
    assert optimizer.seen("2_2", 700) == [3.0]
    assert [param.grad for param in optimizer.params] == [None] * 3


def test_a_part_that_is_all_padding_is_let_go() -> None:
    optimizer = Gradients()
    optimizer.params[2] = Param(2, padding=700)
    optimizer.arrive(2)
    assert optimizer.params[2].grad is None
    assert optimizer.seen("2_2", 700) == [0.0]
    assert optimizer.stage3._offload_boundary_param_ids == set()


def test_a_gradient_is_taken_under_the_lock_of_the_data_paths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hooks of another device's thread may read parameters through the same slots meanwhile."""
    optimizer = Gradients()
    free: list[bool] = []

    def try_lock() -> None:
        lock = optimizer.lock
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
    optimizer = Gradients()
    for window in range(2):
        for micro_step in range(2):
            optimizer.stage3.micro_step_id, optimizer.is_last = micro_step, micro_step == 1
            optimizer.arrive(0, value=1.0 + window)
    assert optimizer.seen("0_1", 5000) == [4.0]


def test_the_norm_is_that_of_the_whole_window() -> None:
    optimizer = Gradients()
    optimizer.is_last = False
    optimizer.arrive(2, value=1.0)
    assert optimizer.norms == {}
    optimizer.stage3.micro_step_id, optimizer.is_last = 1, True
    optimizer.arrive(2, value=2.0)
    norm = optimizer.norms[2]
    assert norm.dtype == torch.float64
    assert norm.item() == (700 * 9.0) ** 0.5


# -- streamed: who gets a finished one -----------------------------------------------------------


def test_in_tiles_the_step_finds_it_in_the_gradient_stream() -> None:
    optimizer = Gradients(is_tiled=True)
    optimizer.arrive(1)
    assert optimizer.handed == []
    assert not optimizer.stage3.fp32_partitioned_groups_flat[0].grad.any()


def test_deepspeeds_swapper_gets_it_once_the_window_is_full() -> None:
    optimizer = Gradients(is_tiled=False)
    optimizer.is_last = False
    optimizer.arrive(1)
    assert optimizer.handed == []
    optimizer.stage3.micro_step_id, optimizer.is_last = 1, True
    optimizer.arrive(1)
    assert optimizer.handed == [("0_1", [5000], [[2.0] * 30])]


def test_a_sub_group_too_small_for_the_drive_gets_it_in_memory() -> None:
    optimizer = Gradients(is_tiled=False, on_drive=False)
    optimizer.arrive(1, value=5.0)
    assert optimizer.handed == []
    gradient = optimizer.stage3.fp32_partitioned_groups_flat[0].grad
    assert torch.unique_consecutive(gradient).tolist() == [0.0, 5.0]
    assert gradient.count_nonzero() == 30


# -- streamed: a window whose end was not known --------------------------------------------------


@pytest.mark.parametrize("is_tiled", [True, False])
def test_a_window_is_finished_with_what_has_arrived(is_tiled: bool) -> None:
    optimizer = Gradients(is_tiled=is_tiled)
    optimizer.is_last = False
    optimizer.arrive(1, value=4.0)
    assert optimizer.seen("0_1", 5030) == [0.0]
    optimizer.path.end_window(stock_unused)
    assert optimizer.seen("0_1", 5030) == [0.0, 4.0]
    assert optimizer.norms[1].item() == (30 * 16.0) ** 0.5
    expected = [] if is_tiled else [("0_1", [5000], [[4.0] * 30])]
    assert optimizer.handed == expected


def test_what_got_no_gradient_in_the_window_is_passed_by() -> None:
    optimizer = Gradients()
    optimizer.arrive(0)
    optimizer.stage3._offload_boundary_param_ids = {2}  # announced, and nothing came
    optimizer.norms.clear()
    optimizer.path.end_window(stock_unused)
    assert optimizer.norms == {}
    optimizer.gradient_stream.set("2_2", 0, torch.full((700,), 6.0))  # by an accessor
    optimizer.path.end_window(stock_unused)
    assert optimizer.seen("2_2", 700) == [6.0]


# -- streamed: verdict and buffers ---------------------------------------------------------------


@pytest.mark.parametrize("value", [1.0, float("inf"), float("nan")])
def test_the_verdict_is_finite_exactly_if_every_gradient_is(value: float) -> None:
    optimizer = Gradients()
    optimizer.arrive(0, 1)
    optimizer.arrive(2, value=value)
    verdict = optimizer.path.verdict()
    assert verdict.shape == (1,)
    assert torch.isfinite(verdict).item() == (value == 1.0)


@pytest.mark.parametrize(("is_tiled", "pins"), [(True, False), (False, True)])
def test_the_flat_buffer_takes_no_memory_and_is_pinned_only_for_whole_steps(
    is_tiled: bool, pins: bool
) -> None:
    gradients, found = Gradients(is_tiled=is_tiled), dict[str, Any]()
    stage3 = gradients.stage3
    stage3.offload_optimizer_pin_memory = True

    def set_up() -> None:
        gradients.path.initialize(lambda: None)
        buffer = torch.zeros(sum(NUMELS), dtype=BF16, device=OffloadDeviceEnum.cpu)
        found.update(nbytes=buffer.untyped_storage().nbytes(), numel=buffer.numel())
        found["pins"] = stage3.offload_optimizer_pin_memory
        stage3.grad_partitions_flat_buffer = buffer
        setattr(stage3, GRAD_PARTITIONS, {0: buffer})

    gradients.path.set_up(set_up)
    assert found == {"nbytes": 2, "numel": sum(NUMELS), "pins": pins}
    assert stage3.offload_optimizer_pin_memory
    assert stage3.grad_partitions_flat_buffer is None
    assert getattr(stage3, GRAD_PARTITIONS) == {}


def test_the_gradient_of_a_single_sub_group_in_memory_is_as_large_and_takes_memory() -> None:
    gradients, kept = Gradients(is_tiled=False, on_drive=False), list[torch.Tensor]()
    gradients.stage3.offload_optimizer_pin_memory = False

    def keep_zeros() -> None:
        kept.append(torch.zeros(sum(NUMELS), device=OffloadDeviceEnum.cpu))

    def set_up() -> None:
        keep_zeros()  # as master weights are made
        gradients.path.initialize(keep_zeros)

    gradients.path.set_up(set_up)
    assert [tensor.untyped_storage().nbytes() for tensor in kept] == [4 * sum(NUMELS)] * 2


# -- flat ----------------------------------------------------------------------------------------


def flat(check: Any, gradients: torch.Tensor | None) -> Any:
    attachment: Any = SimpleNamespace(runtime=SimpleNamespace(overflow_check=check))
    stage3 = SimpleNamespace(grad_partitions_flat_buffer=gradients)
    return FlatGradients(Upstream(stage3), lambda: attachment)


@pytest.mark.parametrize("overflows", [True, False])
def test_the_check_looks_at_the_flat_buffer_and_one_element_stands_for_it(overflows: bool) -> None:
    looked_at: list[Any] = []
    gradients = torch.ones(100, dtype=BF16)
    verdict = flat(lambda found: looked_at.append(found) or overflows, gradients).verdict()
    assert [found is gradients for found in looked_at] == [True]
    assert (verdict.shape, verdict.dtype) == ((1,), BF16)
    assert torch.isfinite(verdict).item() != overflows


def test_without_a_check_or_a_buffer_upstream_looks_itself() -> None:
    assert flat(None, torch.ones(2)).verdict() is None
    assert flat(lambda _: True, None).verdict() is None


def test_the_flat_buffer_lies_in_the_arena() -> None:
    entered: list[str] = []

    @contextmanager
    def host_buffers(component: str) -> Iterator[None]:
        entered.append(component)
        yield
        entered.append("end")

    attachment: Any = SimpleNamespace(host_buffers=host_buffers)
    made = FlatGradients(Upstream(None), lambda: attachment)
    made.set_up(lambda: entered.append("stock"))
    assert entered == ["gradients", "stock", "end"]


def test_gradients_in_the_flat_buffer_go_deepspeeds_own_way() -> None:
    made, called = flat(None, None), list[str]()
    assert made.put(["params"], ["parts"], lambda *given: given) == (["params"], ["parts"])
    made.initialize(lambda: called.append("states"))
    made.end_window(lambda: called.append("window"))
    assert called == ["states", "window"]
