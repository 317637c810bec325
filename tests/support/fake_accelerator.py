"""A stand-in for an accelerator other than CUDA, whose device is the host."""

from __future__ import annotations

import torch


class FakeAccelerator:
    """What memascend asks of DeepSpeed's accelerator; keeps what is registered with it.

    Attributes:
        live: Bytes by address.
        calls: Names of calls, in order.
        refuses: Answer with this exception, or with False for True.
    """

    Event = torch.Event

    def __init__(self, refuses: Exception | bool = False) -> None:
        self.live: dict[int, int] = {}
        self.calls: list[str] = []
        self.refuses = refuses

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self) -> str:
        return "toaster"

    def current_device(self) -> int:
        return 3

    def set_device(self, device_index: int) -> None:
        self.calls.append(f"set_device {device_index}")

    def current_device_name(self) -> str:
        self.calls.append("current_device_name")
        return "cpu"

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        self.calls.append("register_host_memory")
        if isinstance(self.refuses, Exception):
            raise self.refuses
        if not self.refuses:
            self.live[address] = num_bytes
        return not self.refuses

    def unregister_host_memory(self, address: int) -> None:
        self.calls.append("unregister_host_memory")
        if isinstance(self.refuses, Exception):
            raise self.refuses
        del self.live[address]
