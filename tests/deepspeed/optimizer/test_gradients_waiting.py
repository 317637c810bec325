"""Gradients that wait: to be added up, in which dtype and until when; or on the device."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from memascend.base.interfaces import Device
from memascend.config.block import MemAscendConfig
from memascend.errors import StoreFullError
from memascend.memory.guard import Guard
from memascend.streaming.gradients.on_device import GradientsOnDevice
from tests.support.streamed_gradients import BF16, FP32, NUMELS, PLACES, Gradients, stock_unused


def itemsizes(optimizer: Gradients, index: int) -> list[int]:
    """Bytes of an element in each place of a parameter's gradient."""
    keys = [key for key in optimizer.store.keys() if f".{PLACES[index][1]}." in key]  # noqa: SIM118
    return [optimizer.store.nbytes(key=key) // NUMELS[index] for key in keys]


@pytest.mark.parametrize("is_tiled", [True, False])
def test_sums_in_fp32_are_of_gradients_that_were_kept_as_they_were_reduced(
    is_tiled: bool,
) -> None:
    optimizer = Gradients(dtype=FP32, is_tiled=is_tiled)
    for micro_step, value in enumerate((2.0**8, 2.0**-8, 2.0**-7)):
        optimizer.stage3.micro_step_id, optimizer.is_last = micro_step, micro_step == 2
        optimizer.arrive(1, value=value)
    assert itemsizes(optimizer, 1) == [4, 2, 2]
    total = 2.0**8 + 2.0**-8 + 2.0**-7
    assert optimizer.seen("0_1", 5030) == [0.0, total]
    assert optimizer.norms[1].item() == pytest.approx((30 * total**2) ** 0.5)
    assert optimizer.handed == ([] if is_tiled else [("0_1", [5000], [[total] * 30])])


def test_what_waits_is_added_up_when_the_window_turns_out_to_be_over() -> None:
    optimizer = Gradients(dtype=FP32)
    optimizer.is_last = False
    for window in range(2):
        for micro_step in range(3):
            optimizer.stage3.micro_step_id = micro_step
            optimizer.arrive(1, value=2.0 ** (8 * micro_step + window))
        before = [0.0, 65793.0] if window else [0.0]
        assert optimizer.seen("0_1", 5030) == before
        optimizer.path.end_window(stock_unused)
    assert itemsizes(optimizer, 1) == [4, 2, 2, 2]
    assert optimizer.seen("0_1", 5030) == [0.0, 2 * 65793.0]
    norm = (30 * (2 * 65793.0) ** 2) ** 0.5
    assert optimizer.norms[1].item() == pytest.approx(norm)


def test_sums_of_slices_have_more_bits_than_what_was_reduced_and_keep_them() -> None:
    optimizer = Gradients(dtype=FP32)
    section = {"micro_batches": {"count": 2, "reduction": "slice"}}
    optimizer.runtime.config = MemAscendConfig.model_validate(section)
    for micro_step in range(4):
        optimizer.stage3.micro_step_id, optimizer.is_last = micro_step, micro_step == 3
        optimizer.arrive(1, value=1.0 + 2.0**-12)
    assert optimizer.seen("0_1", 5030) == [0.0, 4.0 + 2.0**-10]


def test_a_window_ends_behind_the_walk_of_the_step_before() -> None:
    """Else the walk would be taken for a step that ended half-way."""
    optimizer = Gradients(dtype=FP32)
    optimizer.is_last = False
    optimizer.arrive(1, value=4.0)
    calls: list[str] = []
    optimizer.runtime.background.finish = lambda: calls.append("finish")
    optimizer.steps.drop_ahead = lambda reason: calls.append("drop")
    optimizer.path.end_window(stock_unused)
    assert calls == ["finish", "drop"]


@pytest.mark.parametrize("is_tiled", [True, False])
def test_the_end_of_a_window_is_found_by_who_gets_its_gradients(is_tiled: bool) -> None:
    optimizer = Gradients(dtype=FP32, is_tiled=is_tiled)
    optimizer.is_last = False
    optimizer.arrive(1, value=4.0)
    optimizer.path.end_window(stock_unused)
    assert optimizer.handed == ([] if is_tiled else [("0_1", [5000], [[4.0] * 30])])


@pytest.mark.parametrize("value", [1.0, float("inf"), float("nan")])
def test_the_verdict_is_on_what_waits_too(value: float) -> None:
    """A parameter that gets nothing in the last micro-step: CPU offload looks at all its sums."""
    optimizer = Gradients(dtype=FP32)
    optimizer.is_last = False
    optimizer.arrive(0, 1, value=value)
    optimizer.stage3.micro_step_id, optimizer.is_last = 1, True
    optimizer.arrive(0)
    assert torch.isfinite(optimizer.path.verdict()).item() == (value == 1.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_accumulation_steps": 1},  # whose only one may not be known as the last
        {"communication_data_type": FP32},
        {"all2all_process_group": "quantized: of another dtype"},
        {"gradient_accumulation_dtype": BF16},
    ],
)
def test_gradients_that_may_have_more_bits_or_no_others_beside_them_do_not_wait(
    changes: dict[str, Any],
) -> None:
    optimizer = Gradients(dtype=FP32)
    vars(optimizer.stage3).update(changes)
    optimizer.is_last = False
    optimizer.arrive(1)
    assert itemsizes(optimizer, 1) == [optimizer.stage3.gradient_accumulation_dtype.itemsize]


def test_a_gradient_that_upstream_has_not_cast_to_what_it_is_reduced_in_keeps_its_bits() -> None:
    """In a model of bf16 upstream takes every gradient to be of it; a parameter may be of fp32."""
    optimizer = Gradients(dtype=FP32)
    optimizer.is_last = False
    optimizer.params[1].grad_dtype = FP32
    optimizer.arrive(0, 1, value=0.1)
    assert (itemsizes(optimizer, 0)[-1], itemsizes(optimizer, 1)) == (2, [4])
    optimizer.path.end_window(stock_unused)
    assert optimizer.seen("0_1", 5030)[-1] == torch.tensor(0.1).item()
    optimizer.stage3.dtype = FP32  # as with autocast: then all are cast
    optimizer.arrive(1, value=0.5)
    assert itemsizes(optimizer, 1) == [4, 2]


# -- on the device -------------------------------------------------------------------------------


def with_room(**options: Any) -> Gradients:
    """Gradients of a device that copies by itself, where all three may wait."""
    optimizer = Gradients(**options)
    device = Device(new_stream=lambda: nullcontext)
    on_device = GradientsOnDevice(device, Guard(optimizer.lock))
    on_device.room_bytes = 8 * sum(NUMELS)
    optimizer.runtime.on_device = on_device
    slots = optimizer.gradient_stream._slots
    optimizer.gradient_stream.guard = slots.guard = Guard(optimizer.lock)
    return optimizer


def test_a_hook_returns_before_its_gradient_is_stored_and_the_pass_ends_after_it() -> None:
    optimizer = with_room()
    may_store = threading.Event()
    bypass_of = optimizer.steps.bypass_of

    def late(*arguments: Any, **keywords: Any) -> None:
        assert may_store.wait(60)
        return bypass_of(*arguments, **keywords)

    optimizer.steps.bypass_of = late  # type: ignore[method-assign]
    optimizer.arrive(1, value=3.0)
    assert (optimizer.steps.final, optimizer.norms) == ([], {})
    may_store.set()
    optimizer.path.finish_pass()
    assert optimizer.steps.final == [("0_1", PLACES[1][1])]
    assert optimizer.norms[1].item() == pytest.approx((30 * 9.0) ** 0.5)
    assert optimizer.runtime.on_device.bytes_peak == 2 * NUMELS[1]
    with optimizer.lock:
        assert optimizer.seen("0_1", 5030) == [0.0, 3.0]
    optimizer.runtime.on_device.close()


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_what_waits_on_the_device_is_added_up_as_without(dtype: torch.dtype) -> None:
    """Micro-steps whose sums are stored each time, and whose gradients wait on the drive."""
    optimizers = (with_room(dtype=dtype), Gradients(dtype=dtype))
    for optimizer in optimizers:
        for window in range(2):
            for micro_step in range(3):
                optimizer.stage3.micro_step_id = micro_step
                optimizer.is_last = micro_step == 2
                optimizer.arrive(2, 1, 0, value=1.0 + window + 2.0**-micro_step)
                optimizer.path.finish_pass()
    waited, alone = optimizers
    for name, numel in (("0_1", 5030), ("2_2", 700)):
        with waited.lock:
            assert waited.seen(name, numel) == alone.seen(name, numel)
    assert {i: norm.item() for i, norm in waited.norms.items()} == {
        i: norm.item() for i, norm in alone.norms.items()
    }
    assert waited.runtime.on_device.bytes_peak > 0
    waited.runtime.on_device.close()


def test_the_thread_replaces_a_gradient_that_a_script_has_set() -> None:
    """Its place on the drive is given up, which needs the lock."""
    optimizer = with_room()
    optimizer.arrive(1, value=3.0)
    optimizer.path.finish_pass()
    with optimizer.lock:
        optimizer.gradient_stream.set("0_1", PLACES[1][1], torch.full((30,), 9.0))
    optimizer.arrive(1, value=4.0)
    optimizer.path.finish_pass()
    with optimizer.lock:
        assert optimizer.seen("0_1", 5030) == [0.0, 4.0]
    optimizer.runtime.on_device.close()


def test_a_gradient_larger_than_the_room_is_stored_by_its_hook_behind_the_others() -> None:
    optimizer = with_room()
    optimizer.runtime.on_device.room_bytes = 2 * NUMELS[1]
    optimizer.arrive(1, 0)
    assert [offset for _, offset in optimizer.steps.final] == [PLACES[1][1], PLACES[0][1]]
    optimizer.runtime.on_device.close()


def test_a_gradient_that_could_not_be_stored_fails_its_pass() -> None:
    optimizer = with_room()

    def refuse(*_: Any, **__: Any) -> None:
        raise StoreFullError(28, "the drive is full")

    optimizer.gradient_stream._store.reserve = refuse  # type: ignore[method-assign]
    optimizer.arrive(1)
    with pytest.raises(StoreFullError, match="is full"):
        optimizer.path.finish_pass()
    assert (optimizer.steps.final, optimizer.norms) == ([], {})
    with pytest.raises(StoreFullError, match="is full"):
        optimizer.arrive(2)
    optimizer.runtime.on_device.close()
