"""DeepSpeed's accelerator for "sim": everything that CUDA_Accelerator answers for CUDA."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from tests.device.emulator import collectives, torch_device

MEMORY_BYTES = 8 << 30


def _typed(dtype: torch.dtype) -> Any:
    return property(lambda self: functools.partial(torch.tensor, dtype=dtype, device="sim"))


class SimAccelerator(CPU_Accelerator):
    """The CPU's operators (CPUAdam, async_io) on the host; a device with streams beside it."""

    _torch_pins_host_memory = True

    def __init__(self) -> None:
        super().__init__()
        self._name = "sim"
        self._communication_backend_name = collectives.NAME

    is_synchronized_device = use_host_timers = lambda self: False
    resolves_data_dependency = handles_memory_backpressure = lambda self: False

    def device_name(self, device_index: int | None = None) -> str:
        return "sim" if device_index is None else f"sim:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device("sim", self.current_device() if device_index is None else device_index)

    def set_device(self, device_index: int | str | torch.device) -> None:
        torch_device.set_device(device_index)

    def current_device(self) -> int:
        return torch_device.core.current_device()

    def current_device_name(self) -> str:
        return f"sim:{self.current_device()}"

    def device_count(self) -> int:
        return torch_device.DEVICE_COUNT

    def synchronize(self, device_index: int | None = None) -> None:
        torch_device.core.synchronize()

    Stream = property(lambda self: torch_device.Stream)
    Event = property(lambda self: torch_device.Event)

    def stream(self, stream: torch.Stream | None) -> torch_device.stream:
        return torch_device.stream(stream)

    def current_stream(self, device_index: int | None = None) -> torch.Stream:
        return torch_device.current_stream()

    def default_stream(self, device_index: int | None = None) -> torch.Stream:
        return torch_device.default_stream()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return torch_device.core.memory()["allocated"]

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return torch_device.core.memory()["peak"]

    def memory_reserved(self, device_index: int | None = None) -> int:
        return torch_device.core.memory()["reserved"]

    memory_cached = max_memory_reserved = max_memory_cached = memory_reserved

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        torch_device.core.reset_peak()

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": self.memory_allocated(),
            "allocated_bytes.all.peak": self.max_memory_allocated(),
            "active_bytes.all.peak": torch_device.core.memory()["held_peak"],
        }

    def total_memory(self, device_index: int | None = None) -> int:
        return MEMORY_BYTES

    def available_memory(self, device_index: int | None = None) -> int:
        return MEMORY_BYTES - self.memory_allocated()

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float, torch.bfloat16, torch.float16]

    BFloat16Tensor = _typed(torch.bfloat16)
    ByteTensor = _typed(torch.uint8)
    DoubleTensor = _typed(torch.double)
    FloatTensor = _typed(torch.float)
    HalfTensor = _typed(torch.half)
    IntTensor = _typed(torch.int)
    LongTensor = _typed(torch.long)

    pin_memory = DeepSpeedAccelerator.pin_memory
    _torch_pin_memory = DeepSpeedAccelerator._torch_pin_memory
    _torch_empty_pinned = DeepSpeedAccelerator._torch_empty_pinned

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        return torch_device.core.register_host(address, num_bytes) == 0

    def unregister_host_memory(self, address: int) -> None:
        torch_device.core.unregister_host(address)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "sim"


def install() -> Any:
    """Make "sim" DeepSpeed's accelerator; return the native part. Before DeepSpeed is used."""
    core = torch_device.install()
    collectives.register()
    set_accelerator(SimAccelerator())
    return core


def register_through(registrar: str, patch: pytest.MonkeyPatch) -> None:
    """Have memascend register host memory with the accelerator, CUDA's driver, or nobody."""
    if registrar == "driver":
        from memascend.deepspeed.attach import attach

        device_of = attach.device_of
        patch.setattr(attach, "device_of", lambda it: replace(device_of(it), registrar=None))
    elif registrar == "nobody":
        patch.setattr(SimAccelerator, "register_host_memory", lambda self, address, nbytes: False)
    else:
        assert registrar == "accelerator", registrar
