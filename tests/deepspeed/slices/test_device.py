"""The room of a device is its allocator's memory and the free one, less a margin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from memascend.base.units import GIB, MIB

pytestmark = pytest.mark.deepspeed


def accelerator(**changes: Any) -> Any:
    numbers = {"total": 24, "reserved": 10, "available": 12} | changes
    return SimpleNamespace(
        total_memory=lambda: numbers["total"] * GIB,
        memory_reserved=lambda: numbers["reserved"] * GIB,
        available_memory=lambda: numbers["available"] * GIB,
        memory_allocated=lambda: 0 if numbers["total"] == 0 else GIB,
        device_name=lambda: "cpu",
        is_synchronized_device=lambda: numbers.get("is_cpu", False),
    )


@pytest.mark.parametrize(
    ("numbers", "room_bytes"),
    [
        ({}, 22 * GIB - 24 * GIB // 16),
        ({"available": 2}, 12 * GIB - 24 * GIB // 16),  # others use the device
        ({"available": 23}, 24 * GIB - 24 * GIB // 16),  # a count without other processes
        ({"total": 4, "reserved": 1, "available": 2}, 3 * GIB - 512 * MIB),
    ],
)
def test_others_and_a_margin_are_left_out(numbers: dict[str, Any], room_bytes: int) -> None:
    from memascend.deepspeed.slices.device import AcceleratorMemory

    assert AcceleratorMemory(accelerator(**numbers)).room_bytes() == room_bytes


def test_a_share_that_a_script_sets_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from memascend.deepspeed.slices import device

    module = SimpleNamespace(get_per_process_memory_fraction=lambda: 0.5)
    monkeypatch.setattr(device.torch, "get_device_module", lambda name: module)
    room_bytes = device.AcceleratorMemory(accelerator()).room_bytes()
    assert room_bytes == 12 * GIB - 24 * GIB // 16


@pytest.mark.parametrize(
    ("numbers", "has_account"), [({}, True), ({"is_cpu": True}, False), ({"total": 0}, False)]
)
def test_host_memory_is_no_account_of_a_device(
    monkeypatch: pytest.MonkeyPatch, numbers: dict[str, Any], has_account: bool
) -> None:
    from memascend.deepspeed.slices import device

    monkeypatch.setattr(device, "get_accelerator", lambda: accelerator(**numbers))
    assert (device.device_memory() is not None) == has_account
