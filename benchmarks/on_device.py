"""What the training program asks of its device: times, peaks, traces, and things that go wrong.

On the CPU there is nothing to count but time, and a trace has no device in it.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import kernel_counts
import torch
from deepspeed.accelerator import get_accelerator
from device_trace import DRIVE

from memascend.system.memory import process_status

#: What is tried in turn to fill a device, until none of a size is left.
BALLAST_BYTES = (1 << 30, 64 << 20, 20 << 20)
#: Methods of DeepSpeed's aio_handle that return when the drive has done something.
AIO_WAITS = ("wait", "read", "write", "sync_pread", "sync_pwrite")


class OnDevice:
    """Time on the device, and its memory in this process."""

    def __init__(self) -> None:
        self._accelerator = get_accelerator()
        self._is_host = self._accelerator.is_synchronized_device()

    def take_peaks(self) -> dict[str, int] | None:
        """The most since the last call.

        In tensors; with what was freed and a stream uses still; with what torch keeps for more.
        """
        if self._is_host:
            return None
        peaks = {
            "allocated_bytes": self._accelerator.max_memory_allocated(),
            "active_bytes": self._accelerator.memory_stats()["active_bytes.all.peak"],
            "reserved_bytes": self._accelerator.max_memory_reserved(),
        }
        self._accelerator.reset_peak_memory_stats()
        return peaks

    def mark(self) -> Any:
        """A moment: when the device comes to it, or now where the device is the host."""
        if self._is_host:
            return time.perf_counter()
        event = self._accelerator.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """The time between two marks that the device has passed."""
        return float(end - begin if self._is_host else begin.elapsed_time(end) / 1e3)

    def cached_bytes(self) -> int:
        """What torch's caching allocator holds; none where that is switched off."""
        return 0 if self._is_host else int(self._accelerator.memory_reserved())

    def take_host_peak(self) -> int:
        """The most host memory that this process held since the last call, as the kernel counts it.

        Where the kernel does not reset its count, since the process began (`kernel_counts.lacks`).
        Only the emulated device lies in it as well: that knows what of it is its own.
        """
        if self._accelerator.device_name() == "sim":
            peak_bytes = int(torch.get_device_module("sim").take_host_peak())
        else:
            peak_bytes = kernel_counts.host_peak_bytes()
            kernel_counts.reset_host_peak()
        # These are in no process's RSS.
        return peak_bytes + process_status(os.getpid()).get("HugetlbPages", 0)


def traced(step: Callable[[], None], path: Path, *, stock: bool) -> None:
    """One step under the profiler, with waits for the drive marked; rank 0 writes its trace."""
    _mark_waits(stock)
    with torch.profiler.profile() as profiler:
        step()
    if deepspeed.comm.get_rank() == 0:
        profiler.export_chrome_trace(str(path))


def _mark_waits(stock: bool) -> None:
    if stock:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        handle = AsyncIOBuilder().load().aio_handle
        names = [name for name in AIO_WAITS if hasattr(handle, name)]
    else:
        from memascend._core import Ticket as handle

        names = ["wait"]
    for name in names:
        original = getattr(handle, name)
        if not getattr(original, "is_marked", False):
            setattr(handle, name, _marked(original))


def _marked(original: Callable[..., Any]) -> Callable[..., Any]:
    def marked(*positional: Any, **named: Any) -> Any:
        with torch.profiler.record_function(DRIVE):
            return original(*positional, **named)

    marked.is_marked = True  # type: ignore[attr-defined]
    return marked


def crowded(run: Callable[[], object]) -> int:
    """Runs what needs device memory while there is none; how often that was refused.

    Whoever calls this trains on afterwards: the numbers must be those of a run without it.

    Raises:
        AssertionError: It found room, and whatever it did is done.
    """
    accelerator = get_accelerator()
    accelerator.empty_cache()
    ballast = _ballast()
    try:
        run()
    except torch.OutOfMemoryError:
        return 1
    finally:
        ballast.clear()
        accelerator.empty_cache()
    raise AssertionError("a pass found room on a device that was full")


def _ballast() -> list[torch.Tensor]:
    ballast = []
    device = get_accelerator().current_device_name()
    for nbytes in BALLAST_BYTES:
        while True:
            try:
                ballast.append(torch.empty(nbytes, dtype=torch.uint8, device=device))
            except torch.OutOfMemoryError:
                break
    return ballast


def contexts(driver: Any = None) -> list[int]:
    """Return the devices on which this process has a context, by the driver's own account.

    nvidia-smi shows the processes of a device too, but in a container not by the ids they have
    there, and not every image has it.

    Raises:
        RuntimeError: The driver refuses to say.
    """
    driver = driver or ctypes.CDLL("libcuda.so.1")
    count, flags, is_active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    _require(driver.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    found = []
    for number in range(count.value):
        state = driver.cuDevicePrimaryCtxGetState(
            number, ctypes.byref(flags), ctypes.byref(is_active)
        )
        _require(state, "cuDevicePrimaryCtxGetState")
        if is_active.value:
            found.append(number)
    return found


def _require(code: int, call: str) -> None:
    if code:
        raise RuntimeError(f"{call}: CUDA error {code}")


def contexts_of_ranks(*, everywhere: bool) -> list[list[int]]:
    """Return the devices of each rank's contexts; `everywhere` makes one on each device first."""
    if everywhere:
        for number in range(torch.cuda.device_count()):
            torch.zeros(1, device=f"cuda:{number}")
    found: list[Any] = [None] * deepspeed.comm.get_world_size()
    torch.distributed.all_gather_object(found, contexts())
    return found


def race() -> float:
    """Uses one tensor on two streams without an order: what the sanitizer must notice."""
    accelerator = get_accelerator()
    tensor = torch.ones(1 << 20, device=accelerator.current_device_name())
    accelerator.synchronize()
    with accelerator.stream(accelerator.Stream()):
        tensor.mul_(2)
    tensor.add_(1)
    return float(tensor[0].item())
