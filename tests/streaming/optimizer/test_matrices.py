"""Matrices between the drive and a device: gradients, momentum, updates, padding and errors."""

from __future__ import annotations

import errno
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from memascend.base.interfaces import Device
from memascend.errors import GradientGoneError, StoreError
from memascend.memory.guard import Guard
from memascend.nvme.store import MemoryFaults
from memascend.streaming.gradients.bypass import DriveBypass
from memascend.streaming.gradients.on_device import GradientsOnDevice
from memascend.streaming.optimizer.matrices import MatrixPart, MatrixStream, padded
from memascend.streaming.optimizer.sub_group_step import early_key
from tests.support.streaming_hosts import memory_store
from tests.support.tiled_training import Training

BF16 = torch.bfloat16
#: Larger than a staging slot, and so is its part of the momentum.
GROUP, OFFSET, NUMEL = "0_3", 3000, 16_001
PART = MatrixPart(group=GROUP, offset=OFFSET, numel=NUMEL)


def opened(
    *,
    momentum_dtype: torch.dtype = BF16,
    dtype: torch.dtype = BF16,
    device: Device | None = None,
    **options: Any,
) -> tuple[Training, MatrixStream]:
    training = Training(lambda params: torch.optim.SGD(params, lr=1.0), **options)
    group = training.groups.group(GROUP)
    training.groups.apart = {"momentum": momentum_dtype}
    group.apart = frozenset(training.groups.apart)
    training.groups.add_state(GROUP, "momentum", momentum_dtype, 0.0)
    stream = MatrixStream(
        groups=training.groups,
        gradient_stream=training.gradient_stream,
        slots=training.slots,
        state="momentum",
        dtype=dtype,
        master_dtype=torch.float32,
        device=device or Device(),
        on_device=GradientsOnDevice(device or Device(), Guard(threading.RLock())),
    )
    return training, stream


def values(seed: int, numel: int = NUMEL, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_without_a_gradient_and_before_the_first_step_both_are_zeros() -> None:
    _, stream = opened()
    for found in stream.read(PART):
        assert (found.dtype, found.numel(), bool(found.any())) == (BF16, NUMEL, False)


def test_an_update_takes_the_place_of_the_gradient_and_momentum_that_of_the_last() -> None:
    training, stream = opened()
    training.gradient_stream.put(GROUP, OFFSET, values(1))
    gradient, momentum = stream.read(PART)
    assert torch.equal(gradient, values(1))
    stream.write(PART, values(2), values(3))
    assert not stream.read(PART)[1].any(), "before every matrix is written it is the fill"
    stream.finish(GROUP)
    gradient, momentum = stream.read(PART)
    assert torch.equal(gradient, values(2))
    assert torch.equal(momentum, values(3))
    seen = torch.empty(NUMEL)
    training.gradient_stream.get(GROUP, OFFSET, seen)  # what the walk steps
    assert torch.equal(seen, values(2).float())


class Marks:
    """Events of a device, with all that is asked of them."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def __call__(self) -> Marks:
        return self

    def record(self) -> None:
        self.log.append("record")

    def wait(self) -> None:
        self.log.append("wait")

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def query(self) -> bool:
        return True


def reading_ahead(**options: Any) -> tuple[Training, MatrixStream, Marks]:
    marks = Marks()
    device = Device(new_event=marks, new_stream=lambda: nullcontext)
    training, stream = opened(device=device, **options)
    stream._on_device.room_bytes = 4 * NUMEL
    return training, stream, marks


def test_a_matrix_read_ahead_is_filled_behind_earlier_work_and_used_behind_its_copies() -> None:
    training, stream, marks = reading_ahead()
    training.gradient_stream.put(GROUP, OFFSET, values(1))
    stream.write(PART, values(2), values(3))
    stream.finish(GROUP)
    stream.expect(PART)
    marks.log.clear()
    stream.prefetch()
    assert (marks.log[0], marks.log[-1]) == ("wait", "record")
    marks.log.clear()
    gradient, momentum = stream.read(PART)
    assert marks.log == ["wait"], "it was read already"
    assert torch.equal(gradient, values(2))
    assert torch.equal(momentum, values(3))
    stream.drop()  # nothing is expected any more
    assert marks.log == ["wait"]


def test_codes_that_share_a_scale_with_the_present_matrix_are_read_behind_it() -> None:
    _, stream, _ = reading_ahead(momentum_dtype=torch.int8)
    stream._on_device.room_bytes = 8 * NUMEL  # codes are decoded to fp32
    stream.expect(MatrixPart(group=GROUP, offset=3000, numel=NUMEL))
    assert stream._coming is None
    stream.expect(MatrixPart(group=GROUP, offset=3072, numel=NUMEL))
    assert stream._coming is not None


def test_a_matrix_that_is_dropped_keeps_its_memory_until_its_copies_are_over() -> None:
    training, stream, marks = reading_ahead()
    training.gradient_stream.put(GROUP, OFFSET, values(1))
    stream.expect(PART)
    stream.prefetch()
    marks.log.clear()
    stream.drop()
    assert marks.log == ["synchronize"]


def test_an_error_while_reading_ahead_is_raised_and_its_copies_are_waited_for() -> None:
    faults = MemoryFaults()
    training, stream, marks = reading_ahead(store=memory_store(faults))
    training.gradient_stream.put(GROUP, OFFSET, values(1))
    training.slots.wait_writes()
    stream.expect(PART)
    faults.gone = errno.EIO
    with pytest.raises(StoreError):
        stream.prefetch()
    marks.log.clear()
    stream.drop()
    assert marks.log == ["synchronize"]


def test_without_device_memory_for_two_each_is_read_at_its_turn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training, stream, _ = reading_ahead()
    training.gradient_stream.put(GROUP, OFFSET, values(1))
    empty = stream._empty

    def refuse(numel: int, dtype: torch.dtype) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(stream, "_empty", refuse)
    for _ in range(2):
        stream.expect(PART)
        stream.prefetch()
    monkeypatch.setattr(stream, "_empty", empty)
    assert torch.equal(stream.read(PART)[0], values(1))
    assert caplog.text.count("no memory for a second matrix") == 1


def test_after_an_update_without_memory_no_matrix_is_expected() -> None:
    training, stream, marks = reading_ahead()
    training.gradient_stream.put(GROUP, OFFSET, values(1))
    stream.expect(PART)
    stream.give_up()
    marks.log.clear()
    stream.expect(PART)
    stream.prefetch()
    assert marks.log == []
    assert torch.equal(stream.read(PART)[0], values(1))


def test_the_next_gradient_replaces_an_update() -> None:
    training, stream = opened()
    training.gradient_stream.put(GROUP, OFFSET, values(1))
    stream.write(PART, values(2), values(3))
    training.gradient_stream.put(GROUP, OFFSET, values(4))
    assert torch.equal(stream.read(PART)[0], values(4))


def test_what_the_last_update_was_made_of_is_read_again_until_a_gradient_comes() -> None:
    training, stream = opened()
    training.groups.settle()
    training.gradient_stream.put(GROUP, OFFSET, values(1))
    key = training.groups.group(GROUP).key("momentum")
    training.store.reserve(key=early_key(key), nbytes=2 * training.groups.group(GROUP).numel)
    stream.write_beside(PART, values(3))
    training.slots.wait_writes()
    assert not stream.read(PART)[1].any(), "the other one has not moved on"
    stream.note_applied(PART)
    assert stream.is_replaced(PART)
    with pytest.raises(GradientGoneError, match=r"fused.*false"):
        training.gradient_stream.get(GROUP, OFFSET, torch.empty(NUMEL))
    for found, seed in zip(stream.read_again(PART), (1, 3), strict=True):
        assert torch.equal(found, values(seed))
    stream.set_update(PART, values(2))
    assert not stream.is_replaced(PART)
    assert torch.equal(stream.read(PART)[0], values(2))
    stream.note_applied(PART)
    training.gradient_stream.put(GROUP, OFFSET, values(4))
    assert not stream.is_replaced(PART)


def test_an_update_that_is_lost_leaves_the_gradient() -> None:
    training, stream = opened()
    stream.note_lost(PART)  # it never got a gradient
    training.gradient_stream.put(GROUP, OFFSET, values(1))
    stream.note_applied(PART)
    stream.note_lost(PART)
    assert not stream.is_replaced(PART)
    assert torch.equal(stream.read(PART)[0], values(1))


def test_a_stale_gradient_is_multiplied_as_steps_did_in_their_dtype() -> None:
    training, stream = opened()
    training.gradient_stream.put(GROUP, OFFSET, values(1))
    for factor in (1 / 3, torch.tensor(0.7)):
        training.gradient_stream.note_factor(GROUP, factor, torch.float32)
    expected = values(1).float().mul_(1 / 3).mul_(torch.tensor(0.7)).bfloat16()
    assert torch.equal(stream.read(PART)[0], expected)
    assert not torch.equal(values(1).mul(1 / 3).mul(0.7), expected), "otherwise this shows nothing"


def test_a_gradient_shorter_than_its_part_is_padded_with_zeros() -> None:
    training, stream = opened()
    training.gradient_stream.put(GROUP, OFFSET, values(1, NUMEL - 5))
    gradient, _ = stream.read(PART)
    assert torch.equal(gradient[:-5], values(1, NUMEL - 5))
    assert gradient[-5:].tolist() == [0.0] * 5


def test_values_are_widened_to_the_dtype_of_updates() -> None:
    _, stream = opened(dtype=torch.float32)
    stream.write(PART, values(2, dtype=torch.float32), values(3, dtype=torch.float32))
    stream.finish(GROUP)
    gradient, momentum = stream.read(PART)
    assert torch.equal(gradient, values(2, dtype=torch.float32))
    assert torch.equal(momentum, values(3).float()), "it was stored in bf16"


def test_gradients_that_tiles_were_given_are_never_taken_for_zeros() -> None:
    training, stream = opened()
    training.gradient_stream.put(GROUP, OFFSET, values(1))
    shard = training.gradient_stream.find(GROUP, OFFSET)
    assert shard is not None
    shard.bypassed = [(OFFSET, 16)]
    with pytest.raises(AssertionError, match=GROUP):
        stream.read(PART)


def test_a_write_that_fails_is_raised_when_writes_are_waited_for() -> None:
    faults = MemoryFaults()
    training, stream = opened(store=memory_store(faults))
    faults.gone = errno.EROFS
    stream.write(PART, values(2), values(3))
    with pytest.raises(StoreError):
        training.slots.wait_writes()


def test_values_of_the_right_length_are_not_copied() -> None:
    whole = values(1)
    assert padded(whole, NUMEL) is whole
    assert padded(whole, NUMEL + 1).tolist()[-1] == 0.0


def test_momentum_in_codes_is_the_nearest_of_its_form_and_encoded_again_the_same() -> None:
    training, stream = opened(momentum_dtype=torch.int8)
    group = training.groups.group(GROUP)
    assert (group.coded, group.tile_scales) == (("momentum",), False)
    assert not stream.read(PART)[1].any()
    stream.write(PART, values(2), values(3))
    stream.finish(GROUP)
    _, momentum = stream.read(PART)
    errors = (momentum.float() - values(3).float()).abs()
    assert 0 < errors.max() < values(3).float().abs().max() / 126
    assert training.store.nbytes(key=group.key("momentum")) == group.numel
    pieces = [piece.clone() for piece in stream.stream(GROUP, torch.float32)]
    saved = torch.cat(pieces).view(torch.float32)
    assert not saved[:OFFSET].any()
    training.load(GROUP, "momentum", saved)
    again = [piece.clone() for piece in stream.stream(GROUP, torch.float32)]
    assert torch.equal(torch.cat(again).view(torch.float32), saved)


def test_a_walk_neither_reads_nor_writes_scales_of_momentum() -> None:
    training, stream = opened(momentum_dtype=torch.int8)
    stream.write(PART, values(2), values(3))
    stream.finish(GROUP)
    before = stream.read(PART)[1]
    training.step({}, 1.0)
    assert torch.equal(stream.read(PART)[1], before)


def test_a_checkpoint_gets_momentum_widened_and_zeros_before_the_first_step() -> None:
    training, stream = opened()
    zeros = torch.cat([piece.clone() for piece in stream.stream(GROUP, torch.float32)])
    numel = training.groups.group(GROUP).numel
    assert (zeros.numel(), bool(zeros.any())) == (4 * numel, False)
    value = values(3, numel)
    stream.write(MatrixPart(group=GROUP, offset=0, numel=numel), values(2, numel), value)
    stream.finish(GROUP)
    found = torch.cat([piece.clone() for piece in stream.stream(GROUP, torch.float32)])
    assert torch.equal(found.view(torch.float32), value.float())


def test_momentum_is_read_and_written_beside_without_the_lock_of_the_data_paths() -> None:
    """By the thread that stores gradients, piece by piece: others use the slots meanwhile."""
    training, stream = opened()
    stream.write(PART, values(2), values(3))
    stream.finish(GROUP)
    group = training.groups.group(GROUP)
    key = early_key(group.key("momentum"))
    training.store.reserve(key=key, nbytes=training.store.nbytes(key=group.key("momentum")))
    training.slots.guard = guard = Guard(threading.RLock())
    with pytest.raises(AssertionError, match="without the runtime's lock"):
        stream.read(PART)
    assert torch.equal(stream.read_momentum(PART), values(3))
    stream.write_beside(PART, values(4))
    assert torch.equal(stream.read_momentum(PART), values(3))
    with guard.lock:
        training.slots.wait_writes()
        beside = torch.empty(NUMEL, dtype=BF16)
        training.slots.read(key=key, target=beside, offset_bytes=2 * OFFSET)
    assert torch.equal(beside, values(4))


def test_an_update_that_took_a_gradients_place_is_known() -> None:
    training, stream = opened()
    assert not stream.sees_update(PART)
    training.gradient_stream.put(GROUP, OFFSET, values(1))
    assert not stream.sees_update(PART)
    to_drive = DriveBypass(OFFSET, 4096, find=lambda begin, count: None, is_of_update=True)
    training.gradient_stream.put(GROUP, OFFSET, values(2), bypass=to_drive)
    assert stream.sees_update(PART)
    training.gradient_stream.put(GROUP, OFFSET, values(3))
    assert not stream.sees_update(PART)
