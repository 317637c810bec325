"""What the device is to host memory. DeepSpeed's accelerator is asked what it can do, not its name.

Memory that is registered with the device is copied without blocking the host. CUDA's driver is
asked directly, all others through the accelerator.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from memascend.base.interfaces import Device


def device_of(accelerator: Any) -> Device:
    """Return what there is to know of the accelerator's current device, and bring it into use.

    Setting a device does not bring it into use everywhere, and until then CUDA registers nothing.
    """
    if accelerator.is_synchronized_device():
        return Device()
    first = torch.empty(1, device=accelerator.current_device_name())
    has_driver = first.is_cuda and torch.version.cuda is not None  # ROCm's are "cuda" as well
    return Device(
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
        """Register a range; return what failed."""
        name = type(self._accelerator).__name__
        try:
            if self._accelerator.register_host_memory(address, nbytes):
                return ""
            failure = (
                f"{name}.register_host_memory refuses {nbytes} bytes, or has no way to do it. fix: "
                '"allocator": {"enabled": false} takes the pinned memory of the accelerator'
            )
        except Exception as error:
            failure = f"{name}.register_host_memory of {nbytes} bytes: {error}"
        self._forget_refusal()
        return failure

    def unregister(self, address: int, nbytes: int) -> str:
        """Take a range back; return what failed."""
        try:
            self._accelerator.unregister_host_memory(address)
        except Exception as error:
            self._forget_refusal()
            name = type(self._accelerator).__name__
            return f"{name}.unregister_host_memory of {nbytes} bytes: {error}"
        return ""

    def unregister_when_idle(self, address: int, nbytes: int) -> str:
        """Wait for copies in flight and take a range back; return what failed."""
        try:
            self._accelerator.synchronize()
        except Exception as error:
            return f"{type(self._accelerator).__name__}.synchronize: {error}"
        return self.unregister(address, nbytes)

    def _forget_refusal(self) -> None:
        """Have the refusal reported here: ROCm's runtime gives it to the next kernel's launch."""
        with contextlib.suppress(Exception):
            torch.zeros(1, device=self._accelerator.current_device_name())


def _pci_address(device: torch.device) -> str | None:
    ask = getattr(getattr(torch, device.type, None), "get_device_properties", None)
    properties = ask(device) if ask is not None else None
    if not hasattr(properties, "pci_bus_id"):
        return None  # not of every device, nor of an older torch
    domain, bus, number = (
        int(getattr(properties, f"pci_{name}_id")) for name in ("domain", "bus", "device")
    )
    return f"{domain:04x}:{bus:02x}:{number:02x}.0"
