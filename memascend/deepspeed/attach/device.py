"""The properties of a device that host memory needs, from the methods of DeepSpeed's accelerator.

Memory that is registered with the device is copied without blocking the host. On CUDA the driver
registers it directly, on other devices the accelerator does.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from memascend.base.interfaces import Device


def device_of(accelerator: Any) -> Device:
    """Describe the accelerator's current device, and create its context with one allocation.

    Setting a device does not always create a context, without which CUDA registers nothing.
    """
    if accelerator.is_synchronized_device():
        return Device()
    name = accelerator.current_device_name()
    first = torch.empty(1, device=name)
    has_driver = first.is_cuda and torch.version.cuda is not None  # ROCm devices are "cuda" too
    return Device(
        name=name,
        registers=True,
        registrar=None if has_driver else AcceleratorRegistrar(accelerator),
        pci_address=_pci_address(first.device),
        new_event=accelerator.Event,
        wait_idle=accelerator.synchronize,
        new_stream=lambda: functools.partial(accelerator.stream, accelerator.Stream()),
        use_here=functools.partial(accelerator.set_device, accelerator.current_device()),
    )


class AcceleratorRegistrar:
    """DeepSpeed's `register_host_memory`, for an arena."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def register(self, address: int, nbytes: int) -> str:
        """Register a range; return the error, empty on success."""
        name = type(self._accelerator).__name__
        try:
            if self._accelerator.register_host_memory(address, nbytes):
                return ""
            failure = (
                f"{name}.register_host_memory refuses {nbytes} bytes, or is not supported. fix: "
                '"allocator": {"enabled": false} uses the pinned memory of the accelerator'
            )
        except Exception as error:
            failure = f"{name}.register_host_memory of {nbytes} bytes: {error}"
        self._forget_refusal()
        return failure

    def unregister(self, address: int, nbytes: int) -> str:
        """Unregister a range; return the error, empty on success."""
        try:
            self._accelerator.unregister_host_memory(address)
        except Exception as error:
            self._forget_refusal()
            name = type(self._accelerator).__name__
            return f"{name}.unregister_host_memory of {nbytes} bytes: {error}"
        return ""

    def unregister_when_idle(self, address: int, nbytes: int) -> str:
        """Wait for copies in flight and unregister a range; return the error, empty on success."""
        try:
            self._accelerator.synchronize()
        except Exception as error:
            return f"{type(self._accelerator).__name__}.synchronize: {error}"
        return self.unregister(address, nbytes)

    def _forget_refusal(self) -> None:
        """Clear the error: ROCm's runtime reports it again at the next kernel launch."""
        with contextlib.suppress(Exception):
            torch.zeros(1, device=self._accelerator.current_device_name())


def _pci_address(device: torch.device) -> str | None:
    ask = getattr(getattr(torch, device.type, None), "get_device_properties", None)
    properties = ask(device) if ask is not None else None
    if not hasattr(properties, "pci_bus_id"):
        return None  # not available for every device, nor in an older torch
    domain, bus, number = (
        int(getattr(properties, f"pci_{name}_id")) for name in ("domain", "bus", "device")
    )
    return f"{domain:04x}:{bus:02x}:{number:02x}.0"
