"""Whole matrices of an optimizer that needs them, such as Muon: read and written one by one.

Before the walk over tiles each matrix's gradient is replaced by its update, and its momentum moves
on. Both pass through the staging slots to the device and back, so host memory does not grow with
the matrix. On a device with streams the next matrix is read while one is computed, on a stream of
its own, within the room of gradients that wait on the device: none waits in a step. Knows torch,
the sub-groups and the gradient stream; neither which update it is nor how ranks exchange their
parts. One thread at a time may call.

The thread that stores gradients reads and writes momentum as soon as a gradient is final, without
the lock: it takes it for each piece.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from memascend.base.interfaces import Device, Event
from memascend.base.sizes import SCALE_NUMEL
from memascend.base.waiting import event_here
from memascend.streaming.gradients.accumulation import GradientShard
from memascend.streaming.gradients.on_device import GradientsOnDevice
from memascend.streaming.gradients.stream import GradientStream
from memascend.streaming.optimizer.sub_group_step import early_key
from memascend.streaming.optimizer.sub_groups import SubGroups
from memascend.transfer.staging import StagingSlots

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixPart:
    """This rank's part of a matrix, as a range of its sub-group.

    Attributes:
        group: Name of the sub-group.
        offset: First element in it.
        numel: Elements, with the padding behind the end of the matrix.
    """

    group: str
    offset: int
    numel: int


@dataclass(slots=True, eq=False)
class _Coming:
    """A matrix that has memory on the device; `filled` passes when it has been read."""

    part: MatrixPart
    shard: GradientShard | None  # its stored gradient; None: zeros
    gradient: torch.Tensor | None  # 1-D, as it is stored
    momentum: torch.Tensor  # 1-D, as it is stored; in fp32 of codes
    free: Event | None  # passes when earlier users of this memory are done
    filled: Event | None = None


class MatrixStream:
    """Gradients and momentum of matrices, between the drive and a device."""

    def __init__(
        self,
        *,
        groups: SubGroups,
        gradient_stream: GradientStream,
        slots: StagingSlots,
        state: str,
        dtype: torch.dtype,
        master_dtype: torch.dtype,
        device: Device,
        on_device: GradientsOnDevice,
    ) -> None:
        """Wire the stream.

        Args:
            groups: Sub-groups whose tiles do not have the momentum.
            gradient_stream: Gradients before the walk, updates after.
            slots: The staging slots of both.
            state: Name of the momentum.
            dtype: Dtype of gradients, momentum and updates on the device.
            master_dtype: Dtype in which finished steps have multiplied gradients.
            device: Device on which matrices are updated.
            on_device: The room for the matrix that is read ahead.
        """
        self._groups, self._gradient_stream, self._slots = groups, gradient_stream, slots
        self._state = state
        self._dtype, self._master_dtype = dtype, master_dtype
        self._device, self._on_device = device, on_device
        self._on_stream = nullcontext if device.new_stream is None else device.new_stream()
        self._coming: _Coming | None = None
        self._has_memory = True  # for a second matrix

    # -- reads -----------------------------------------------------------------------------------

    def expect(self, part: MatrixPart) -> None:
        """Take device memory for the next matrix, if the room has so much; else do nothing.

        Call it before the update of the present matrix is launched: the memory may be filled once
        the work launched so far is done.
        """
        group = self._groups.group(part.group)
        stored = group.read_dtypes[self._state]
        nbytes = part.numel * (self._dtype.itemsize + stored.itemsize)
        if group.is_coded(self._state) and part.offset % SCALE_NUMEL:
            return  # its first momentum is rounded once more with the present matrix's
        if not self._has_memory or not self._on_device.grant(nbytes):
            return
        try:
            self._coming = self._take_memory(part)
        except torch.OutOfMemoryError:
            self.give_up()

    @property
    def is_expecting(self) -> bool:
        """Whether the next matrix has memory on the device."""
        return self._coming is not None

    def give_up(self) -> None:
        """Expect no matrix any more: the device has no memory for two."""
        if self._has_memory:
            log.warning(
                "memascend: the device has no memory for a second matrix of Muon. From now on each "
                "is read when its turn comes, and the drive waits while one is computed"
            )
        self._has_memory = False
        self.drop()

    def prefetch(self) -> None:
        """Read the expected matrix beside the work of the device; do nothing if there is none.

        Raises:
            StoreError: A read failed.
        """
        coming = self._coming
        if coming is None:
            return
        with self._on_stream():
            if coming.free is not None:
                coming.free.wait()
            self._fill(coming)

    def read(self, part: MatrixPart) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (gradient, momentum), 1-D, as new tensors on the device.

        A gradient that never arrived, and padding, are zeros.

        Raises:
            StoreError: A read failed.
        """
        coming = self._coming
        if coming is None or coming.part != part or coming.filled is None:
            self.drop()
            coming = self._take_memory(part)
            self._fill(coming)
        else:
            coming.filled.wait()
        self._coming = None
        return self._gradient_of(coming), coming.momentum.to(self._dtype)

    def read_again(self, part: MatrixPart) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (gradient, momentum) as they were before the last update, which was applied.

        Raises:
            StoreError: A read failed.
        """
        self.drop()
        again = self._take_memory(part)
        self._fill(again, is_last=True)
        return self._gradient_of(again), again.momentum.to(self._dtype)

    def read_momentum(self, part: MatrixPart) -> torch.Tensor:
        """Return the momentum, 1-D, as a new tensor on the device; locks for each piece.

        Raises:
            StoreError: A read failed.
        """
        momentum = self._empty(part.numel, self._groups.group(part.group).read_dtypes[self._state])
        for begin, count in self._slots.chunks(part.numel, momentum.itemsize):
            with self._slots.turn(count * momentum.itemsize):
                piece = momentum.narrow(0, begin, count)
                self._groups.get(part.group, part.offset + begin, piece, state=self._state)
        return momentum.to(self._dtype)

    def sees_update(self, part: MatrixPart) -> bool:
        """Return whether an update, made during backward, has taken the gradient's place."""
        shard = self._shard(part)
        return shard is not None and shard.seen is not None and shard.seen.is_update

    def is_replaced(self, part: MatrixPart) -> bool:
        """Return whether the gradient is an update that was applied, and has to be made again."""
        shard = self._shard(part)
        return shard is not None and shard.is_replaced

    def drop(self) -> None:
        """Forget the matrix that was expected, once no copy into it is in flight."""
        if self._coming is not None and self._coming.filled is not None:
            self._coming.filled.synchronize()
        self._coming = None

    def _shard(self, part: MatrixPart) -> GradientShard | None:
        return self._gradient_stream.find(part.group, part.offset)

    def _take_memory(self, part: MatrixPart) -> _Coming:
        shard, gradient = self._shard(part), None
        if shard is not None and shard.bypassed:
            raise AssertionError(f"tiles of {part.group} were given gradients of a matrix")
        if shard is not None and shard.seen is not None:
            gradient = self._empty(shard.seen.numel, shard.seen.dtype)
        stored = self._groups.group(part.group).read_dtypes[self._state]
        momentum = self._empty(part.numel, stored)
        return _Coming(part, shard, gradient, momentum, event_here(self._device.new_event))

    def _empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self._device.name)

    def _fill(self, coming: _Coming, *, is_last: bool = False) -> None:
        """Read a matrix, on the current stream; with the momentum before the last update or now."""
        part, shard = coming.part, coming.shard
        try:
            if is_last:
                key = early_key(self._groups.group(part.group).key(self._state))
                offset_bytes = part.offset * coming.momentum.itemsize
                self._slots.read(key=key, target=coming.momentum, offset_bytes=offset_bytes)
            else:
                self._groups.get(part.group, part.offset, coming.momentum, state=self._state)
            if coming.gradient is not None:
                assert shard is not None
                assert shard.seen is not None
                # As it is stored: a copy that casts would make a temporary in host memory.
                self._slots.read(key=shard.seen.key, target=coming.gradient)
        finally:
            coming.filled = event_here(self._device.new_event)

    def _gradient_of(self, coming: _Coming) -> torch.Tensor:
        part, found = coming.part, coming.gradient
        if found is None:
            return torch.zeros(part.numel, dtype=self._dtype, device=self._device.name)
        assert coming.shard is not None
        if coming.shard.factors:
            found = found.to(self._master_dtype)
        for factor in coming.shard.factors:
            found.mul_(factor)
        return padded(found.to(self._dtype), part.numel)

    # -- writes, and checkpoints -----------------------------------------------------------------

    def write(self, part: MatrixPart, update: torch.Tensor, momentum: torch.Tensor) -> None:
        """Replace the gradient by the update, and the momentum; errors come from the slots.

        Args:
            part: The part.
            update: 1-D, on the device, of `part.numel` elements.
            momentum: The same.
        """
        self.set_update(part, update)
        group = self._groups.group(part.group)
        if group.is_coded(self._state):
            self._groups.set(part.group, part.offset, momentum, state=self._state)
        else:
            self._write_momentum(part, momentum, group.key(self._state))

    def set_update(self, part: MatrixPart, update: torch.Tensor) -> None:
        """Store an update where its gradient was."""
        self._gradient_stream.set(part.group, part.offset, update)

    def write_beside(self, part: MatrixPart, momentum: torch.Tensor) -> None:
        """Store momentum of a matrix beside that before the update, which may be made again.

        Locks for each piece.
        """
        key = self._groups.group(part.group).key(self._state)
        self._write_momentum(part, momentum, early_key(key))

    def note_applied(self, part: MatrixPart) -> None:
        """Note that an update was applied, and not stored."""
        self._gradient_stream.note_replaced(part.group, part.offset)

    def note_lost(self, part: MatrixPart) -> None:
        """Note that such an update cannot be made again: the gradient stands for it."""
        shard = self._shard(part)
        if shard is not None:
            shard.is_replaced = False

    def _write_momentum(self, part: MatrixPart, momentum: torch.Tensor, key: str) -> None:
        stored = self._groups.group(part.group).states[self._state]
        for begin, count in self._slots.chunks(momentum.numel(), stored.itemsize):
            with self._slots.turn(count * stored.itemsize):
                self._slots.write(
                    key=key,
                    source=momentum.narrow(0, begin, count),
                    offset_bytes=(part.offset + begin) * stored.itemsize,
                    dtype=stored,
                )

    def finish(self, group: str) -> None:
        """Note that all matrices of a sub-group were written: its momentum is no fill any more."""
        self._groups.group(group).fills.pop(self._state, None)

    def stream(self, group: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Yield the bytes of a sub-group's momentum in order, cast to `dtype`, each until the next.

        Codes are in fp32, so that they can be encoded again without loss.

        Raises:
            StoreError: A read failed.
        """
        if self._groups.group(group).is_coded(self._state):
            yield from self._groups.stream(group, self._state)
            return
        numel = self._groups.group(group).numel
        for begin, count in self._slots.chunks(numel, dtype.itemsize):
            staged = self._slots.take(count, dtype)
            try:
                self._groups.get(group, begin, staged, state=self._state)
                yield staged.view(torch.uint8)
            finally:
                self._slots.give_back(staged)


def padded(values: torch.Tensor, numel: int) -> torch.Tensor:
    """Return 1-D values with zeros behind them, up to `numel` elements; as they are if so many."""
    if values.numel() == numel:
        return values
    whole = values.new_zeros(numel)
    whole.narrow(0, 0, values.numel()).copy_(values)
    return whole
