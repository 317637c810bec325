"""The device "sim" as torch sees it: `torch.sim`, its streams and events."""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import torch
import torch._meta_registrations  # shapes of results are found on the meta device

from tests.device.emulator import build

DEVICE_TYPE = 20  # torch's number of PrivateUse1

DEVICE_COUNT = 4

core: Any = None


def Event(
    enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
) -> torch.Event:
    """torch.cuda.Event's face; a torch.Event needs to be told its device."""
    return torch.Event("sim", enable_timing=enable_timing, blocking=blocking)


class Stream(torch.Stream):
    """torch.cuda.Stream's face."""

    def __new__(cls, device: Any = None, priority: int = 0, **keywords: Any) -> Stream:
        return super().__new__(
            cls, device=torch.device("sim", core.own_device()), priority=priority
        )


def current_stream(device: Any = None) -> torch.Stream:
    return _stream_of(core.current_stream())


def default_stream(device: Any = None) -> torch.Stream:
    return _stream_of(0)


def _stream_of(number: int) -> torch.Stream:
    return torch.Stream(stream_id=number, device_index=core.own_device(), device_type=DEVICE_TYPE)


def set_device(device: Any) -> None:
    """Make a device the current one of this thread: a number, a name or a torch.device."""
    core.set_device(device if isinstance(device, int) else torch.device(device).index)


class stream:
    """A context in which a stream is the current one, as torch.cuda.stream."""

    def __init__(self, wanted: torch.Stream | None) -> None:
        self.wanted = wanted

    def __enter__(self) -> torch.Stream | None:
        self.before = core.current_device(), core.current_stream()
        if self.wanted is not None:
            core.set_stream(self.wanted.stream_id)
        return self.wanted

    def __exit__(self, *details: object) -> None:
        if self.wanted is not None:
            device, number = self.before
            core.set_stream(number)
            core.set_device(device)  # which makes a context there, as torch.cuda.stream does


def install(device: int | None = None) -> Any:
    """Make "sim" a device of torch, once; return the native part.

    Args:
        device: What the process works on, this thread first; None: that of its number as a rank.
    """
    global core
    if core is not None:
        return core
    torch.utils.rename_privateuse1_backend("sim")
    core = build.load()
    core.set_own_device(int(os.environ.get("LOCAL_RANK", "0")) if device is None else device)
    module = types.ModuleType("torch.sim")
    vars(module).update(_surface())
    torch._register_device_module("sim", module)
    sys.modules["torch.sim"] = module
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return core


def _surface() -> dict[str, Any]:
    """What torch and DeepSpeed look for in a device's module."""
    generator = torch.default_generator
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "device_count": lambda: DEVICE_COUNT,
        "current_device": lambda: core.current_device(),
        "set_device": set_device,
        "synchronize": lambda device=None: core.synchronize(),
        "sleep": core.sleep,
        "manual_seed": generator.manual_seed,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda state, device=None: generator.set_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: core.memory()["allocated"],
        "max_memory_allocated": lambda device=None: core.memory()["peak"],
        "memory_reserved": lambda device=None: core.memory()["reserved"],
        "reset_peak_memory_stats": lambda device=None: core.reset_peak(),
        "take_host_peak": core.take_host_peak,
        "Event": Event,
        "Stream": Stream,
        "stream": stream,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": lambda wanted: core.set_stream(wanted.stream_id),
        "device": torch.device,
    }
