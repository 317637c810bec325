"""What is asked of DeepSpeed's accelerator, and what becomes of its refusals."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

from memascend.base.interfaces import Device
from memascend.base.units import MIB
from memascend.deepspeed.attach.device import AcceleratorRegistrar, device_of
from memascend.memory.allocator import HostAllocator
from tests.support.fake_accelerator import FakeAccelerator


def registering(accelerator: FakeAccelerator) -> HostAllocator:
    return HostAllocator(
        huge_pages="transparent",  # explicit ones do not go back
        lock=False,
        register_device=True,
        registrar=AcceleratorRegistrar(accelerator),
    )


def test_memory_of_the_host_alone_is_not_registered() -> None:
    if not get_accelerator().is_synchronized_device():
        pytest.skip("there is a device here")
    assert device_of(get_accelerator()) == Device()


def test_an_accelerator_is_asked_what_it_can_do_and_not_its_name() -> None:
    accelerator = FakeAccelerator()
    device = device_of(accelerator)
    assert device.registers
    assert isinstance(device.registrar, AcceleratorRegistrar)
    assert device.new_event is accelerator.Event
    assert device.wait_idle == accelerator.synchronize
    assert device.pci_address is None


def test_the_device_is_in_use_before_anything_is_registered() -> None:
    accelerator = FakeAccelerator()
    device = device_of(accelerator)
    assert accelerator.calls == ["current_device_name"]
    allocator = HostAllocator(lock=False, register_device=True, registrar=device.registrar)
    allocator.tensor(MIB, torch.uint8, component="pool")
    assert accelerator.calls[-1] == "register_host_memory"


def test_another_thread_takes_the_device_of_the_one_that_asked() -> None:
    accelerator = FakeAccelerator()
    device_of(accelerator).use_here()
    assert accelerator.calls[-1] == "set_device 3"


def test_a_driver_of_cuda_is_asked_itself_and_rocm_is_not_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = SimpleNamespace(is_cuda=True, device=torch.device("cpu"))
    monkeypatch.setattr(torch, "empty", lambda *shape, device: made)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert device_of(FakeAccelerator()).registrar is None
    monkeypatch.setattr(torch.version, "cuda", None)
    assert isinstance(device_of(FakeAccelerator()).registrar, AcceleratorRegistrar)


def test_the_bus_address_is_told_by_any_device_that_knows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xC1, pci_device_id=2)
    monkeypatch.setattr(torch.cpu, "get_device_properties", lambda device: known, raising=False)
    assert device_of(FakeAccelerator()).pci_address == "0001:c1:02.0"
    monkeypatch.setattr(torch.cpu, "get_device_properties", lambda device: object())
    assert device_of(FakeAccelerator()).pci_address is None


def test_an_arena_is_registered_with_any_accelerator_and_goes_back() -> None:
    accelerator = FakeAccelerator()
    allocator = registering(accelerator)
    tensor = allocator.tensor(3 * MIB, torch.uint8, component="pool")
    (address,) = accelerator.live
    assert address <= tensor.data_ptr() < address + accelerator.live[address]
    assert allocator.unregistered_bytes == 0
    del tensor
    allocator.core.trim()
    assert accelerator.calls[-2:] == ["synchronize", "unregister_host_memory"]
    assert accelerator.live == {}


@pytest.mark.parametrize("refusal", [True, RuntimeError("no room in the map")])
def test_what_an_accelerator_refuses_is_told_with_the_bytes(refusal: Exception | bool) -> None:
    accelerator = FakeAccelerator(refuses=refusal)
    failure = AcceleratorRegistrar(accelerator).register(4096, 8192)
    assert "FakeAccelerator.register_host_memory" in failure
    assert "8192" in failure
    expected = "no room in the map" if isinstance(refusal, Exception) else "allocator"
    assert expected in failure
    # Where it waits for the next launch of a kernel, that is one of ours.
    assert accelerator.calls[-1] == "current_device_name"


def test_an_accelerator_without_registration_refuses() -> None:
    """The abstract class answers False for all that do not have it, as XPU."""
    without = DeepSpeedAccelerator.register_host_memory

    class Without(FakeAccelerator):
        def register_host_memory(self, address: int, num_bytes: int) -> bool:
            return bool(without(self, address, num_bytes))

    assert "fix: " in AcceleratorRegistrar(Without()).register(4096, 8192)


def test_what_cannot_be_unregistered_stays_in_the_arena() -> None:
    accelerator = FakeAccelerator()
    allocator = registering(accelerator)
    allocator.tensor(2 * MIB, torch.uint8, component="pool")
    accelerator.refuses = RuntimeError("busy")
    allocator.core.trim()
    assert allocator.core.stats().reserved_bytes == 2 * MIB
    assert any("busy" in note for note in allocator.core.notes())
    accelerator.refuses = False
