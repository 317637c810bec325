"""Whole matrices of an optimizer that needs them, such as Muon: read and written one by one.

Before the walk over tiles each matrix's gradient is replaced by its update, and its momentum moves
on. Both pass through the staging slots to the device and back, so host memory does not grow with
the matrix. Knows torch, the sub-groups and the gradient stream; neither which update it is nor how
ranks exchange their parts. One thread at a time may call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from memascend.streaming.gradients.stream import GradientStream
from memascend.streaming.optimizer.sub_groups import SubGroups
from memascend.transfer.staging import StagingSlots


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
        device: torch.device | str,
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
        """
        self._groups, self._gradient_stream, self._slots = groups, gradient_stream, slots
        self._state = state
        self._dtype, self._master_dtype, self._device = dtype, master_dtype, device

    def read(self, part: MatrixPart) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (gradient, momentum), 1-D, as new tensors on the device.

        A gradient that never arrived, and padding, are zeros.

        Raises:
            StoreError: A read failed.
        """
        stored = self._groups.group(part.group).states[self._state]
        momentum = torch.empty(part.numel, dtype=stored, device=self._device)
        self._groups.get(part.group, part.offset, momentum, state=self._state)
        return self._read_gradient(part), momentum.to(self._dtype)

    def _read_gradient(self, part: MatrixPart) -> torch.Tensor:
        shard = self._gradient_stream.find(part.group, part.offset)
        if shard is None or shard.seen is None:
            return torch.zeros(part.numel, dtype=self._dtype, device=self._device)
        if shard.bypassed:
            raise AssertionError(f"tiles of {part.group} were given gradients of a matrix")
        # Cast on the device: a copy that casts would make a temporary in host memory.
        found = torch.empty(shard.seen.numel, dtype=shard.seen.dtype, device=self._device)
        self._slots.read(key=shard.seen.key, target=found)
        if shard.factors:
            found = found.to(self._master_dtype)
        for factor in shard.factors:
            found.mul_(factor)
        return padded(found.to(self._dtype), part.numel)

    def write(self, part: MatrixPart, update: torch.Tensor, momentum: torch.Tensor) -> None:
        """Replace the gradient by the update, and the momentum; errors come from the slots.

        Args:
            part: The part.
            update: 1-D, on the device, of `part.numel` elements.
            momentum: The same.
        """
        self._gradient_stream.set(part.group, part.offset, update)
        group = self._groups.group(part.group)
        stored = group.states[self._state]
        self._slots.write(
            key=group.key(self._state),
            source=momentum,
            offset_bytes=part.offset * stored.itemsize,
            dtype=stored,
        )

    def finish(self, group: str) -> None:
        """Note that all matrices of a sub-group were written: its momentum is no fill any more."""
        self._groups.group(group).fills.pop(self._state, None)

    def stream(self, group: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Yield the bytes of a sub-group's momentum in order, cast to `dtype`, each until the next.

        Raises:
            StoreError: A read failed.
        """
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
