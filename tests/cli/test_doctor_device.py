"""`memascend doctor` on the device: whether host memory can be registered with it."""

from __future__ import annotations

import pytest

from memascend.cli import doctor
from tests.support.fake_accelerator import FakeAccelerator


@pytest.mark.parametrize(
    ("refuses", "state", "named"),
    [
        (False, "ok", "can be registered"),
        (True, "note", "not registered with the device"),
        (RuntimeError("no room"), "note", "no room"),
    ],
)
def test_whether_memory_can_be_registered_with_the_device_is_tried(
    monkeypatch: pytest.MonkeyPatch, refuses: Exception | bool, state: str, named: str
) -> None:
    real = pytest.importorskip("deepspeed.accelerator")
    accelerator = FakeAccelerator(refuses=refuses)
    monkeypatch.setattr(real, "get_accelerator", lambda: accelerator)
    check = doctor._device()
    assert (check.name, check.state) == ("device", state)
    assert named in check.found
    assert (state != "ok") == ("allocator" in check.fix)
    assert accelerator.live == {}


def test_a_device_that_cannot_be_asked_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.sys.modules, "deepspeed.accelerator", None)
    check = doctor._device()
    assert (check.name, check.state) == ("device", "note")
    assert check.fix


def test_a_torch_that_finds_no_gpu_is_a_note_unless_the_cpu_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = pytest.importorskip("deepspeed.accelerator")
    cpu = pytest.importorskip("deepspeed.accelerator.cpu_accelerator").CPU_Accelerator()
    monkeypatch.setattr(real, "get_accelerator", lambda: cpu)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    check = doctor._device()
    assert check.state == "note"
    assert "finds no GPU" in check.found
    assert "driver" in check.fix
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert doctor._device() == doctor.Check("device", "ok", "cpu: memory of the host")
