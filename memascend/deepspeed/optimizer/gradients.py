"""Gradients of the ZeRO-3 optimizer: DeepSpeed's flat buffer, or a stream in its place.

Both have the same methods; `original` is DeepSpeed's own way, which flat gradients go.

The gradient stream accumulates in the same dtype, at the same micro-steps and with the same stale
values as the flat buffer. Norms and the overflow verdict come from the sums of squares that the
gradient stream computes while it copies.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from deepspeed.accelerator import get_accelerator

from memascend.deepspeed.attach.attachment import Attachment
from memascend.deepspeed.optimizer.locked import locked, with_lock
from memascend.deepspeed.optimizer.muon import uses_muon
from memascend.deepspeed.optimizer.upstream import Upstream
from memascend.deepspeed.stock.host_buffers import AbsentBuffers
from memascend.runtime import Runtime
from memascend.streaming.gradients.accumulation import GradientShard
from memascend.streaming.gradients.bypass import DriveBypass
from memascend.streaming.gradients.stream import GradientStream

log = logging.getLogger(__name__)


class StepSide(Protocol):
    """The step, as far as gradients concern it."""

    def bypass_of(self, name: str, offset: int, *, replaces: bool) -> DriveBypass | None:
        """Return tile memory for a gradient of the coming step; None: write it to the drive."""

    def note_final(self, name: str, offset: int) -> None:
        """Note that a gradient is final: the coming step uses its value."""

    def update_early(self, param: Any, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return the update that takes the place of a final gradient; None: none does."""

    def drop_ahead(self, reason: str) -> None:
        """Discard work done ahead for the coming step: its inputs are about to change."""

    @property
    def is_tiled(self) -> bool:
        """Whether the step reads gradients from the gradient stream."""


class FlatGradients:
    """Gradients in DeepSpeed's flat buffer, which is in the arena."""

    is_streamed = False

    def __init__(self, upstream: Upstream, attach: Callable[[], Attachment]) -> None:
        """Start without a buffer.

        Args:
            upstream: The optimizer.
            attach: Returns the model's attachment, once DeepSpeed has formed sub-groups.
        """
        self._upstream, self._attach = upstream, attach

    def set_up(self, original: Callable[[], None]) -> None:
        """Set up as DeepSpeed, in the arena."""
        with self._attach().host_buffers("gradients"):
            original()

    def initialize(self, original: Callable[[], None]) -> None:
        """Initialize as given."""
        original()

    def put(
        self,
        params: list[Any],
        partitions: list[Any],
        original: Callable[[list[Any], list[Any]], Any],
    ) -> Any:
        """Store as DeepSpeed."""
        return original(params, partitions)

    def end_window(self, original: Callable[[], None]) -> None:
        """Finish as DeepSpeed."""
        original()

    def finish_pass(self) -> None:
        """Do nothing: no gradient waits."""

    def verdict(self) -> torch.Tensor | None:
        """Return one element: inf if the flat buffer has a non-finite value, else 0.

        None: DeepSpeed must check by itself.
        """
        check = self._attach().runtime.overflow_check
        gradients = self._upstream.flat_gradients
        if check is None or gradients is None:
            return None
        return gradients.new_tensor([float("inf") if check(gradients) else 0.0])


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A gradient of a micro-step, as the hook that brings it knows it."""

    param: Any
    position: tuple[int, int, int]  # sub-group, first element in it, elements
    accumulates: bool  # whether it is added to the gradient before
    is_final: bool  # whether the next step sees the result
    narrow_dtype: torch.dtype | None  # in which it may wait on the drive to be added

    @property
    def replaces(self) -> bool:
        """Whether it is stored as it is, as the latest value."""
        return not self.accumulates and (self.is_final or self.narrow_dtype is None)


class StreamedGradients:
    """Gradients in the gradient stream, from reduced partition to norm."""

    is_streamed = True

    def __init__(
        self, upstream: Upstream, attach: Callable[[], Attachment], steps: StepSide
    ) -> None:
        """Start without a gradient.

        Args:
            upstream: The optimizer.
            attach: Returns the model's attachment, once DeepSpeed has formed sub-groups.
            steps: Gets to know gradients that are final.
        """
        self._upstream, self._attach, self._steps = upstream, attach, steps
        self._lacks_memory = False  # of the device, for the sum of a matrix's gradients
        # Torch function modes, entered until the end of `set_up`.
        self._setting_up = ExitStack()

    @property
    def runtime(self) -> Runtime:
        """The model's runtime."""
        return self._attach().runtime

    @property
    def _stream(self) -> GradientStream:
        return self.runtime.gradients

    def set_up(self, original: Callable[[], None]) -> None:
        """Set up as DeepSpeed; the flat buffer and its pinned copy take no memory."""
        with (
            ExitStack() as self._setting_up,
            self._upstream.pinning_gradients(not self._steps.is_tiled),
        ):
            original()
        self._upstream.drop_flat_gradients()

    def initialize(self, original: Callable[[], None]) -> None:
        """Initialize as given, then intercept the allocation of the flat buffer.

        Not earlier: the call allocates gradients of sub-groups in memory. If there is only one
        sub-group its gradient is as large as the flat buffer, and it is used.
        """
        original()
        numel = sum(param.partition_numel() for param in self._upstream.all_params)
        self._setting_up.enter_context(AbsentBuffers(torch.zeros, {numel}))

    def put(
        self,
        params: list[Any],
        partitions: list[Any],
        original: Callable[[list[Any], list[Any]], Any],
    ) -> Any:
        """Store in the gradient stream, after the last step has read the old gradients."""
        self.runtime.background.finish()
        for param, partition in zip(params, partitions, strict=True):
            if self._upstream.part_begin(param, param.partition_numel()) < param.ds_numel:
                self._upstream.note_reduced(param)
                self._put(param, partition.view(-1))
                if not get_accelerator().is_synchronized_device() and param.grad is not None:
                    param.grad.record_stream(get_accelerator().current_stream())
            param.grad = None
        return []

    def _put(self, param: Any, gradient: torch.Tensor) -> None:
        """Leave a gradient to the thread that stores them; store it here if it cannot wait."""
        upstream = self._upstream
        gradient = gradient.to(upstream.accumulation_dtype)
        arrival = _Arrival(
            param=param,
            position=upstream.position_of(param),
            accumulates=upstream.micro_step != 0,
            is_final=upstream.is_last_micro_step(),
            narrow_dtype=self._narrow_dtype(param),
        )
        on_device = self.runtime.on_device
        if self._steps.is_tiled and on_device.has_room(gradient.nbytes):
            # On the stream of the hook, behind what reduced it.
            squares = self._stream.squares_of(gradient) if arrival.replaces else None
            if on_device.put(gradient, functools.partial(self._pass_on, arrival, squares)):
                return
        on_device.check()
        # Other threads' hooks may read parameters.
        with_lock(self.runtime, functools.partial(self._pass_on, arrival, None, gradient))

    def _pass_on(
        self, arrival: _Arrival, squares: torch.Tensor | None, gradient: torch.Tensor
    ) -> None:
        """Store a gradient in the stream, and note it if it is final.

        Runs in the hook with the lock, or without it on the thread of `GradientsOnDevice`.
        """
        number, offset, _ = arrival.position
        name, is_final = self._upstream.masters[number].ds_id, arrival.is_final
        finished = bypass = None
        if is_final and not self._steps.is_tiled:
            finished = torch.empty_like(gradient, dtype=self._upstream.master_dtype)
        if is_final:
            with self.runtime.lock:
                bypass = self._steps.bypass_of(name, offset, replaces=not arrival.accumulates)
        accumulates = arrival.accumulates
        if bypass is not None and uses_muon([arrival.param]):
            whole, update = self._whole(arrival, squares, gradient), None
            if whole is not None:
                (gradient, squares), accumulates = whole, False
                update = self._steps.update_early(arrival.param, gradient)
            if update is None:
                bypass = None
            else:
                gradient, bypass = update, replace(bypass, is_of_update=True)
        shard = self._stream.put(
            name,
            offset,
            gradient,
            accumulate=accumulates,
            final=is_final,
            arrived=arrival.narrow_dtype,
            result=finished,
            bypass=bypass,
            squares=squares,
        )
        if is_final:
            self._note_norm(arrival.param, shard)
            with self.runtime.lock:
                self._steps.note_final(name, offset)
        if finished is not None:
            self._hand_over(number, offset, finished)

    def _whole(
        self, arrival: _Arrival, squares: torch.Tensor | None, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return a final gradient, or the sum with those before, and its sum of squares.

        None: the device has no memory for a sum.
        """
        if not arrival.accumulates:
            return gradient, self._stream.squares_of(gradient) if squares is None else squares
        number, offset, _ = arrival.position
        try:
            whole = torch.empty_like(gradient)
        except torch.OutOfMemoryError:
            if not self._lacks_memory:
                log.warning(
                    "memascend: the device has no memory for the sum of a matrix's gradients, of "
                    "which Muon would make an update during backward: it is made after backward. "
                    "fix: fewer tokens in a micro-batch"
                )
            self._lacks_memory = True
            return None
        here = DriveBypass(
            offset=offset,
            tile_numel=gradient.numel(),
            find=lambda begin, count: whole.narrow(0, begin - offset, count),
        )
        name = self._upstream.masters[number].ds_id
        shard = self._stream.put(name, offset, gradient, accumulate=True, bypass=here)
        return whole, shard.squares

    def finish_pass(self) -> None:
        """Wait until no gradient waits on the device.

        Raises:
            StoreError: One could not be stored; other errors likewise.
        """
        self.runtime.on_device.wait()
        self.runtime.on_device.check()

    def _narrow_dtype(self, param: Any) -> torch.dtype | None:
        """Return the dtype in which a gradient arrived, if DeepSpeed widens it to accumulate.

        Else None; also without `gradient_accumulation_steps`: if the script ends a window by itself
        after one micro-step, its only gradient would be stored twice.
        """
        upstream = self._upstream
        if upstream.micro_step_count == 1 or upstream.reduces_quantized:
            return None
        if self.runtime.config.sums_slices:
            return None  # a sum of slices has more bits than the gradients that were reduced
        dtype = upstream.arriving_dtype_of(param)
        if dtype == upstream.dtype:  # DeepSpeed assumes this dtype for every gradient
            dtype = torch.promote_types(dtype, param.grad.dtype)
        return dtype if dtype.itemsize < upstream.accumulation_dtype.itemsize else None

    def end_window(self, original: Callable[[], None]) -> None:
        """Finish a window if its last backward pass was not known to be the last."""
        self.runtime.background.finish()
        with_lock(self.runtime, self._end_window)

    def _end_window(self) -> None:
        self._steps.drop_ahead("the end of a window was stated after its backward pass")
        for param in self._upstream.reduced_params():
            number, offset, _ = self._upstream.position_of(param)
            name = self._upstream.masters[number].ds_id
            shard = self._stream.find(name, offset)
            if shard is None or shard.is_empty:
                continue
            self._stream.make_final(name, offset)
            self._note_norm(param, shard)
            if shard.latest is not None and not self._steps.is_tiled:
                gradient = torch.empty(shard.latest.numel, dtype=self._upstream.master_dtype)
                self._stream.get(name, offset, gradient)
                self._hand_over(number, offset, gradient)

    def _note_norm(self, param: Any, shard: GradientShard) -> None:
        if shard.squares is not None:
            self._upstream.note_norm(param, shard.squares**0.5)

    def _hand_over(self, number: int, offset: int, gradient: torch.Tensor) -> None:
        """Pass a final gradient to DeepSpeed's own swapper, or copy it to the one in memory."""
        master = self._upstream.masters[number]
        if self._upstream.is_swapped(number):
            self._upstream.state_swapper.swap_out_gradients(
                parameter=master, gradient_offsets=[offset], gradient_tensors=[gradient]
            )
            return
        target = master.grad.narrow(0, offset, gradient.numel())
        target.copy_(gradient, non_blocking=True)

    @locked
    def verdict(self) -> torch.Tensor:
        """Return one element: finite exactly if all gradients are."""
        total = self._stream.sum_of_squares()
        # DeepSpeed's flat buffer, which this replaces, is on this device.
        return total.reshape(1).to(self._upstream.device)


#: The way of gradients from reduction to the step.
GradientPath = StreamedGradients | FlatGradients
