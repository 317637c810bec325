"""Forward on two streams with activations on the drive; prints what the device found.

Started by tests/device/test_memory.py.
"""

from __future__ import annotations

import json
import os

import torch

from memascend.base.interfaces import Device, HostMemory
from memascend.streaming.activations.hooks import SavedTensors
from memascend.streaming.activations.stream import ActivationStream
from memascend.transfer.staging import StagingSlots
from tests.device.emulator import torch_device
from tests.support.streaming_hosts import memory_store

OWN_DEVICE = 1
NUMEL, SLOT_BYTES, LAYERS = 1 << 16, 1 << 16, 6


class Pinned(HostMemory):
    """Page-locked memory."""

    def allocate(self, nbytes: int, *, component: str, zero: bool) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8).pin_memory()

    def contains(self, tensor: torch.Tensor) -> bool:
        return True


def gradient(saved: SavedTensors | None) -> torch.Tensor:
    """Of layers side by side, each on a stream of its own."""
    torch.manual_seed(0)
    start = torch.randn(NUMEL).to("sim").requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(
        *((saved.pack, saved.unpack) if saved is not None else (lambda t: t, lambda t: t))
    ):
        main, side = torch_device.Stream(), torch_device.Stream()
        one = other = start
        for own in (main, side):
            own.wait_stream(torch_device.current_stream())
        for _ in range(LAYERS):
            with torch_device.stream(main):
                one = one.sin() * 1.5
            with torch_device.stream(side):
                other = other.cos() * 0.5
        for own in (main, side):
            torch_device.current_stream().wait_stream(own)
        one.record_stream(torch_device.current_stream())
        other.record_stream(torch_device.current_stream())
        start.record_stream(main)
        start.record_stream(side)
    (one + other).sum().backward()
    assert start.grad is not None
    return start.grad.cpu()


def main() -> None:
    core = torch_device.install(OWN_DEVICE)  # as a rank whose device is not a thread's first
    slots = StagingSlots(
        store=memory_store(),
        memory=Pinned(),
        slot_bytes=SLOT_BYTES,
        slot_count=3,
        new_event=torch_device.Event,
    )
    copies = torch_device.Stream()
    stream = ActivationStream(
        slots=slots,
        device_bytes=0,
        device=Device(
            new_event=torch_device.Event,
            new_stream=lambda: lambda: torch_device.stream(copies),
            use_here=lambda: torch_device.set_device(OWN_DEVICE),
        ),
    )
    saved = SavedTensors(
        stream, min_bytes=1024, device=torch.device("sim", OWN_DEVICE), is_of_model=lambda _: False
    )
    expected = gradient(None)
    core.synchronize()
    before = core.take_findings()
    core.set_delays(2, 20_000, 500)
    found = gradient(saved)
    core.synchronize()
    facts = {
        "before": before,
        "findings": core.take_findings(),
        "equal": torch.equal(found, expected),
        "read_bytes": stream.traffic.read_bytes,
    }
    print(json.dumps(facts), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
