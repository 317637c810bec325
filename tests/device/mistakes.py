"""Deliberate mistakes in memascend: what the emulated device must notice.

Each makes wrong what was right before: a run with one has to end with other numbers, findings or an
error.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

Mistake = Callable[[pytest.MonkeyPatch], None]


def slot_back_before_gather_copy(patch: pytest.MonkeyPatch) -> None:
    """A parameter's slot is free while its copy to the device is pending."""
    from memascend.deepspeed.parameters.swapper import ParameterSwapper

    original = ParameterSwapper._let_go
    patch.setattr(
        ParameterSwapper, "_let_go", lambda self, shard, event=None: original(self, shard)
    )


def gather_event_on_default_stream(patch: pytest.MonkeyPatch) -> None:
    """The event behind the gather is recorded on another stream than the copy's."""
    from memascend.deepspeed.parameters.swapper import ParameterSwapper

    _on_default_stream(patch, ParameterSwapper, "after_gather")


def store_reads_unfilled_slot(patch: pytest.MonkeyPatch) -> None:
    """A staging slot goes to the drive before the copy into it has happened."""
    from memascend.transfer.staging import StagingSlots

    original = StagingSlots.submit
    passed = SimpleNamespace(query=lambda: True)

    def submit(self: Any, key: str, staged: Any, offset_bytes: int, *_: Any) -> None:
        original(self, key, staged, offset_bytes, passed)  # type: ignore[arg-type]

    patch.setattr(StagingSlots, "submit", submit)


def slot_taken_before_copied_out(patch: pytest.MonkeyPatch) -> None:
    """A staging slot that is given back is free at once."""
    from memascend.transfer.staging import StagingSlots

    patch.setattr(StagingSlots, "give_back", StagingSlots.free)


def gradient_not_recorded(patch: pytest.MonkeyPatch) -> None:
    """The gradient's memory is reused while the reduce stream copies from it."""
    import torch

    patch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)


def put_on_default_stream(patch: pytest.MonkeyPatch) -> None:
    """Gradients are copied on the default stream, not on the one that reduced them."""
    from memascend.streaming.gradients.stream import GradientStream

    _on_default_stream(patch, GradientStream, "put")


def gradient_stored_before_it_arrives(patch: pytest.MonkeyPatch) -> None:
    """The thread that stores gradients does not wait for what reduces them."""
    from memascend.streaming.gradients.on_device import GradientsOnDevice

    original = GradientsOnDevice._serve_on_stream

    def serve(self: Any, one: Any) -> None:
        one.arrived = None
        original(self, one)

    patch.setattr(GradientsOnDevice, "_serve_on_stream", serve)


def gradient_let_go_while_it_is_copied(patch: pytest.MonkeyPatch) -> None:
    """The memory of a gradient is used again while the thread's copies read it."""
    from memascend.streaming.gradients.on_device import GradientsOnDevice

    def serve(self: Any, one: Any) -> None:
        one.arrived.wait()
        one.store(one.gradient)

    patch.setattr(GradientsOnDevice, "_serve_on_stream", serve)


def tile_stepped_before_copied(patch: pytest.MonkeyPatch) -> None:
    """A tile is used again while its weights are on their way to the device."""
    from memascend.streaming.optimizer.tile_memory import TileMemory

    def copy_part(self: Any, tile: Any, source: Any, target: Any) -> None:
        target.copy_(source, non_blocking=True)

    patch.setattr(TileMemory, "copy_part", copy_part)


def activation_used_before_it_came(patch: pytest.MonkeyPatch) -> None:
    """Backward computes with what is still being copied to the device."""
    from memascend.streaming.activations.copies import Copies

    original = Copies.read

    def read(self: Any, record: Any, data: Any) -> None:
        original(self, record, data)

    patch.setattr(Copies, "read", read)


def activation_read_into_memory_in_use(patch: pytest.MonkeyPatch) -> None:
    """The copy of what is read does not wait for those who had its memory before."""
    from memascend.streaming.activations.copies import Copies

    original = Copies.allocate

    def allocate(self: Any, record: Any) -> None:
        original(self, record)
        record.filled = None

    patch.setattr(Copies, "allocate", allocate)


def activation_written_before_it_is_filled(patch: pytest.MonkeyPatch) -> None:
    """The copy to the host does not wait for what computes the activation."""
    from memascend.streaming.activations.copies import Copies

    original = Copies.write

    def write(self: Any, record: Any, data: Any) -> None:
        record.filled = None
        original(self, record, data)

    patch.setattr(Copies, "write", write)


def activations_on_device_0(patch: pytest.MonkeyPatch) -> None:
    """The thread that copies activations keeps the device that a new thread has."""
    from memascend.streaming.activations.copies import Copies

    patch.setattr(Copies, "current", lambda self: self._on_stream())


def steps_on_device_0(patch: pytest.MonkeyPatch) -> None:
    """The thread that steps, and waits for gradients in backward, keeps that device."""
    from memascend.runtime import Runtime

    patch.setattr(Runtime, "_prepare_step", lambda self: None)


def event_used_again_while_it_is_held(patch: pytest.MonkeyPatch) -> None:
    """All events are one: who waits for a copy is told of the last one that any stream made."""
    from memascend.base.waiting import EventPool, _PooledEvent, new_event

    def give(self: Any) -> Any:
        self.only = getattr(self, "only", None) or new_event(self._make)
        return _PooledEvent(self.only, self)

    patch.setattr(EventPool, "__call__", give)


def gather_on_any_stream(patch: pytest.MonkeyPatch) -> None:
    """A gather begins on the stream of whoever happens to begin it."""
    from memascend.deepspeed.parameters import gathers_on_demand

    patch.setattr(gathers_on_demand, "stream_here", lambda: None)


def _on_default_stream(patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    from tests.device.emulator import torch_device

    original = getattr(owner, name)

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        with torch_device.stream(torch_device.default_stream()):
            return original(self, *arguments, **keywords)

    patch.setattr(owner, name, call)


MISTAKES: dict[str, Mistake] = {
    mistake.__name__: mistake
    for mistake in (
        slot_back_before_gather_copy,
        gather_event_on_default_stream,
        store_reads_unfilled_slot,
        slot_taken_before_copied_out,
        gradient_not_recorded,
        put_on_default_stream,
        gradient_stored_before_it_arrives,
        gradient_let_go_while_it_is_copied,
        tile_stepped_before_copied,
        activation_used_before_it_came,
        activation_read_into_memory_in_use,
        activation_written_before_it_is_filled,
        activations_on_device_0,
        steps_on_device_0,
        event_used_again_while_it_is_held,
        gather_on_any_stream,
    )
}
