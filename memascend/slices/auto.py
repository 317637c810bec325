"""Chooses the number of slices at run time: the fewest that fit the device, or the stated number.

The first pass has one sequence in each slice, and every call in slices is measured. Before the
second pass all ranks agree on the most sequences of a slice with which every call would have fit;
all later passes keep this number. Where memory runs out in a slice, it is halved for the next pass.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from memascend.base.units import format_nbytes
from memascend.config.block import slices_of
from memascend.slices.layers import WeightsOf
from memascend.slices.sliced import SliceWeights

log = logging.getLogger(__name__)

#: Sequences of a slice where a rank has no limit: it has measured no call of two slices or more.
NO_LIMIT = 1 << 20
_RULE = '{{"micro_batches": {{"sequences": {}}}}}'


class DeviceMemory(Protocol):
    """The device memory of this process, in bytes."""

    def held_bytes(self) -> int:
        """Return the memory of all tensors."""

    def begin_peak(self) -> None:
        """Begin to note the most that tensors take."""

    def peak_bytes(self) -> int:
        """Return the most that tensors have taken since then."""

    def room_bytes(self) -> int:
        """Return the most that tensors may take."""


@dataclass(frozen=True, slots=True)
class Need:
    """The device memory of one call in slices, from slices of one sequence."""

    sequence_bytes: int  # of each sequence in a slice
    rest_bytes: int  # the rest of the call's peak

    @classmethod
    def of(cls, slices: Sequence[tuple[int, int]]) -> Need:
        """Return the need of a call, from the bytes before each of its slices, and its peak.

        The first slice also gathers weights, and the last one reduces gradients: that is not
        repeated for each sequence.
        """
        taken = [peak - before for before, peak in slices]
        sequence_bytes = max(1, *(taken[1:-1] or [min(taken)]))
        return cls(sequence_bytes, max(peak for _, peak in slices) - sequence_bytes)

    def sequences(self, room_bytes: int) -> int:
        """Return how many sequences of a slice fit; 1 if not even one does."""
        return max(1, (room_bytes - self.rest_bytes) // self.sequence_bytes)


class AutoSlices:
    """The number of sequences of a slice, for one model."""

    def __init__(self, memory: DeviceMemory | None, least_of_ranks: Callable[[int], int]) -> None:
        """Start with slices of one sequence.

        Args:
            memory: Account of the device's memory; None: there is none.
            least_of_ranks: Returns the least of a number of each rank.
        """
        self._memory, self._least_of_ranks = memory, least_of_ranks
        self._sequences = 1
        self._is_chosen = memory is None
        self._has_begun = False
        self._needs: list[Need] = []
        self._has_measured_backward = False
        self._batch = 0  # sequences of the last pass; documents if it is a packed row
        self._has_failed = self._has_shrunk = False
        if memory is None:
            log.info(
                "memascend: slices of 1 sequence: this accelerator gives no account of its memory. "
                "To choose another number: %s",
                _RULE.format(2),
            )

    def begin(self) -> None:
        """Begin a forward pass that trains, with the number chosen by then; all ranks call this."""
        if self._has_begun and not self._is_chosen:
            self._choose()
        self._has_begun = True
        self._needs.clear()
        self._has_measured_backward = self._has_failed = self._has_shrunk = False
        self._batch = 0

    def slices_of(self, batch: int) -> int:
        """Return the number of slices of a batch of so many sequences in this pass."""
        self._batch = max(self._batch, batch)
        return slices_of(batch, self._sequences)

    def watched(self, weights_of: WeightsOf) -> WeightsOf:
        """Wrap a function that returns the weights of a call: its passes are watched."""
        return lambda params: _WatchedWeights(weights_of(params), self)

    @property
    def measured(self) -> DeviceMemory | None:
        """The account with which the slices of this pass are measured; None: they are not."""
        return None if self._is_chosen else self._memory

    @property
    def shrunk_to(self) -> int | None:
        """Most sequences of a slice from now on, if memory ran out in this pass; else None."""
        return self._sequences if self._has_shrunk else None

    def note_call(self, slices: Sequence[tuple[int, int]], *, is_backward: bool) -> None:
        """Note the bytes before each slice of a call, and their peak; one slice tells nothing."""
        if len(slices) > 1 and not self._has_failed:
            self._needs.append(Need.of(slices))
            self._has_measured_backward |= is_backward

    def note_failure(self, error: torch.OutOfMemoryError) -> None:
        """Halve the slices of the next pass, and say so in the error; once in a pass."""
        if self._has_failed:
            return
        self._has_failed = True
        self._needs.clear()
        self._has_measured_backward = False
        batch = max(1, self._batch)
        before = min(self._sequences, batch)
        text = _ran_out(batch, before)
        if before > 1:
            self._sequences, self._has_shrunk = before // 2, True
            text += (
                f"; the next pass has {slices_of(batch, before // 2)} of up to {before // 2}. fix: "
                f"try this step again from its forward pass on, or set {_RULE.format(before // 2)} "
                "in the block"
            )
        error.args = (f"{error}\n{text}",)

    def _choose(self) -> None:
        """Choose the number of sequences, if a rank has measured a pass."""
        need, room_bytes = self._tightest()
        own = NO_LIMIT
        if need is not None:
            fits = min(need.sequences(room_bytes), self._batch)
            own = -(-self._batch // slices_of(self._batch, fits))
        chosen = self._least_of_ranks(own)
        if chosen == NO_LIMIT:
            return
        self._sequences, self._is_chosen = chosen, True
        taken = "another rank has chosen"
        if need is not None:
            taken = (
                f"one takes {format_nbytes(chosen * need.sequence_bytes)} of device memory, "
                f"{format_nbytes(max(0, room_bytes - need.rest_bytes))} are free"
            )
        log.info(
            "memascend: slices of %d sequence(s): %s. The same in every run: %s",
            chosen,
            taken,
            _RULE.format(chosen),
        )

    def _tightest(self) -> tuple[Need | None, int]:
        """Return the call of the last pass with the least room, and the room of all."""
        if self._memory is None or not self._has_measured_backward:
            return None, 0
        room_bytes = self._memory.room_bytes()
        return min(self._needs, key=lambda need: need.sequences(room_bytes)), room_bytes


class StatedSlices:
    """A number of slices that the block states; where memory runs out, errors name smaller ones."""

    #: Nothing is measured.
    measured = None

    def __init__(self, slices_of: Callable[[int], int]) -> None:
        """Take the number of slices of a batch of so many sequences from a function."""
        self._slices_of = slices_of
        self._batch = 1  # sequences of the last pass

    def slices_of(self, batch: int) -> int:
        """Return the number of slices of a batch of so many sequences."""
        self._batch = batch
        return self._slices_of(batch)

    def watched(self, weights_of: WeightsOf) -> WeightsOf:
        """Wrap a function that returns the weights of a call: its passes are watched."""
        return lambda params: _WatchedWeights(weights_of(params), self)

    def note_call(self, slices: Sequence[tuple[int, int]], *, is_backward: bool) -> None:
        """Do nothing."""

    def note_failure(self, error: torch.OutOfMemoryError) -> None:
        """Name smaller slices in the error, once."""
        sequences = -(-self._batch // self._slices_of(self._batch))
        text = _ran_out(self._batch, sequences)
        if text in str(error):
            return
        if sequences > 1:
            text += f". fix: {_RULE.format(sequences // 2)} in the block"
        error.args = (f"{error}\n{text}",)


def _ran_out(batch: int, sequences: int) -> str:
    """Return what an error says of slices of so many sequences; with a remedy if they have one."""
    text = f"memascend: memory ran out in one of {slices_of(batch, sequences)} slices of up to "
    if sequences > 1:
        return f"{text}{sequences} sequence(s)"
    return (
        f"{text}1 sequence, and there is no smaller one. fix: shorter sequences, the section "
        "memascend.activations, a smaller batch, or free device memory"
    )


class _WatchedWeights:
    """Measures the slices of a call, and notes where memory runs out."""

    def __init__(self, weights: SliceWeights, auto: AutoSlices | StatedSlices) -> None:
        self._weights, self._auto = weights, auto

    def in_forward(self) -> AbstractContextManager[Callable[[int], None]]:
        return self._watching(self._weights.in_forward(), is_backward=False)

    def in_backward(self, count: int) -> AbstractContextManager[Callable[[int], None]]:
        return self._watching(self._weights.in_backward(count), is_backward=True)

    @contextmanager
    def _watching(
        self, inner: AbstractContextManager[Callable[[int], None]], *, is_backward: bool
    ) -> Iterator[Callable[[int], None]]:
        memory = self._auto.measured
        meter = None if memory is None else _Meter(memory)
        try:
            with inner as begin_slice:
                yield begin_slice if meter is None else functools.partial(meter.begin, begin_slice)
                if meter is not None:
                    meter.end()
        except torch.OutOfMemoryError as error:
            self._auto.note_failure(error)
            raise
        if meter is not None:
            self._auto.note_call(meter.slices, is_backward=is_backward)


class _Meter:
    """Measures one slice after the other."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._before: int | None = None
        self.slices: list[tuple[int, int]] = []  # bytes before each, and its peak

    def begin(self, begin_slice: Callable[[int], Any], number: int) -> None:
        """Begin a slice; work between two slices belongs to neither."""
        self.end()
        begin_slice(number)
        self._memory.begin_peak()
        self._before = self._memory.held_bytes()

    def end(self) -> None:
        """End the slice that runs."""
        if self._before is not None:
            self.slices.append((self._before, self._memory.peak_bytes()))
            self._before = None
