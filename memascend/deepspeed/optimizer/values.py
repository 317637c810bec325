"""Single values of the ZeRO-3 optimizer: `safe_get_*` and `safe_set_*` of one parameter.

DeepSpeed's accessors ask for this rank's part of a gradient, of master weights or of a state,
change it, and have it stored. Parts of a tiled optimizer are read from the store and written back;
parts of whole sub-groups are DeepSpeed's, and copied where a buffer is about to be used again. Both
have the same methods; `original` is DeepSpeed's own way.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from memascend.deepspeed.attach.attachment import Attachment
from memascend.deepspeed.optimizer.locked import locked
from memascend.deepspeed.optimizer.upstream import Upstream
from memascend.runtime import Runtime
from memascend.streaming.optimizer.step import Step, StepPhase
from memascend.streaming.optimizer.sub_groups import SubGroups

#: This rank's part of a value, and the number of its sub-group.
Part = tuple[torch.Tensor, int]


class Stepping(Protocol):
    """The steps of the values."""

    current: Step


class Waiting(Stepping, Protocol):
    """The step, as far as readers of values wait for it."""

    def finish(self) -> None:
        """Wait until the last step has written every value."""

    def drop_ahead(self, reason: str) -> None:
        """Discard work done ahead for the coming step: its inputs are about to change."""

    def note_look(self) -> None:
        """Note that the script reads a gradient."""


class WholeValues:
    """Values of whole sub-groups, in DeepSpeed's buffers.

    The lock is held: a gradient that arrives meanwhile goes through the same buffers.
    """

    def __init__(
        self, upstream: Upstream, attach: Callable[[], Attachment], steps: Stepping
    ) -> None:
        """Wrap the values of an optimizer, whose steps may end half-way."""
        self._upstream, self._attach, self._steps = upstream, attach, steps

    @property
    def runtime(self) -> Runtime:
        """The model's runtime."""
        return self._attach().runtime

    def check(self) -> None:
        """Refuse values of a torn step; a step gathers parameters while it is under way.

        Raises:
            TornStepError: The last step or load ended half-way.
        """
        if self._steps.current.phase is StepPhase.TORN:
            self._steps.current.check()

    @locked
    def gradient(self, param: Any, is_released: bool, original: Callable[..., Part]) -> Part:
        """Return a part of a gradient as DeepSpeed."""
        return self._kept(original(param, is_released), is_released)

    @locked
    def state(
        self, param: Any, is_released: bool, state: str | None, original: Callable[..., Part]
    ) -> Part:
        """Return a part of a state as DeepSpeed."""
        self.check()
        return self._kept(original(param, is_released, state), is_released)

    def _kept(self, found: Part, is_released: bool) -> Part:
        """Return a copy of a part if it is in a swap buffer that was released.

        If the device is the CPU DeepSpeed returns a view of that buffer, which the next sub-group
        overwrites.
        """
        part, number = found
        is_lent = is_released and self._upstream.is_swapped(number)
        return part.clone() if is_lent else part, number

    @locked
    def put_back(self, original: Callable[[], None]) -> None:
        """Store as DeepSpeed."""
        original()

    def update_gradients(
        self,
        update: Callable[[torch.Tensor, Any], torch.Tensor],
        params: list[Any],
        original: Callable[..., None],
    ) -> None:
        """Update as DeepSpeed."""
        original(update, params)


class _PutBack(threading.local):
    """Stores the tensor that an accessor returned on this thread, which has changed it."""

    call: Callable[[], None] | None = None


class TiledValues:
    """Values of sub-groups that are in the store."""

    def __init__(
        self, upstream: Upstream, attach: Callable[[], Attachment], steps: Waiting
    ) -> None:
        """Start without a value that is to be stored.

        Args:
            upstream: The optimizer.
            attach: Returns the model's attachment.
            steps: The step that may be under way.
        """
        self._upstream, self._attach, self._steps = upstream, attach, steps
        # One for each thread: hooks on two threads may set values at the same time.
        self._put_back = _PutBack()

    @property
    def runtime(self) -> Runtime:
        """The model's runtime."""
        return self._attach().runtime

    @property
    def _groups(self) -> SubGroups:
        return self.runtime.optimizer.groups

    def check(self) -> None:
        """Refuse values of a torn step; while its walk is under way they are no error.

        Raises:
            TornStepError: The last step or load ended half-way.
        """
        if not self.runtime.background.is_under_way:
            self._steps.current.check()

    def gradient(self, param: Any, is_released: bool, original: Callable[..., Part]) -> Part:
        """Return a part of a gradient as the next step would see it.

        A part that is not released is set, all of it: an update of Muon that is nowhere is then
        returned as zeros.

        Raises:
            GradientGoneError: The part is to be read, and a step has used it up.
        """
        return self._gradient(param, is_read=is_released, is_put_back=not is_released)

    def _gradient(self, param: Any, *, is_read: bool, is_put_back: bool) -> Part:
        number, offset, numel = self._upstream.position_of(param)
        flat = self._upstream.masters[number]
        self._finish_sub_group(flat.ds_id)
        gradient = torch.zeros(numel, dtype=flat.dtype)
        self._get_gradient(flat.ds_id, offset, gradient, is_read)
        if is_put_back:
            put_back = functools.partial(self.runtime.gradients.set, flat.ds_id, offset, gradient)
            self._put_back.call = put_back
        return gradient, number

    @locked
    def _get_gradient(self, name: str, offset: int, target: torch.Tensor, is_read: bool) -> None:
        self.runtime.on_device.check()  # else this would be the value of the pass before
        self._steps.note_look()
        gradients = self.runtime.gradients
        shard = gradients.find(name, offset)
        if is_read or shard is None or not shard.is_replaced:
            gradients.get(name, offset, target)

    def state(
        self, param: Any, is_released: bool, state: str | None, original: Callable[..., Part]
    ) -> Part:
        """Return a part of a state, or of the master weights.

        Raises:
            TornStepError: As `check`.
        """
        number, offset, numel = self._upstream.position_of(param)
        flat = self._upstream.masters[number]
        self._finish_sub_group(flat.ds_id)
        self.check()
        dtype = flat.dtype
        if state is not None:
            # The wider dtype, since DeepSpeed gathers states in fp32; but Muon's momentum as it is.
            group = self._groups.group(flat.ds_id)
            stored = group.read_dtypes[state]
            dtype = stored if state in group.apart else torch.promote_types(stored, dtype)
        value = torch.empty(numel, dtype=dtype)
        with self.runtime.lock:
            self._groups.get(flat.ds_id, offset, value, state=state)
        if not is_released:
            put_back = functools.partial(self._groups.set, flat.ds_id, offset, value)
            self._put_back.call = functools.partial(put_back, state=state)
        return value, number

    def _finish_sub_group(self, name: str) -> None:
        """Wait until the last step has written the values of one sub-group.

        Raises:
            StoreError: The step failed before that.
        """
        walk = self.runtime.background
        if walk.is_under_way:
            walk.wait_for([name])
        else:
            self._steps.finish()

    def put_back(self, original: Callable[[], None]) -> None:
        """Store the tensor that an accessor returned; only accessors call this."""
        put_back, self._put_back.call = self._put_back.call, None
        if put_back is not None:
            self._steps.finish()
            self._put_back_value(put_back)

    @locked
    def _put_back_value(self, put_back: Callable[[], None]) -> None:
        self._steps.drop_ahead("a value was set between backward and step()")
        put_back()

    def update_gradients(
        self,
        update: Callable[[torch.Tensor, Any], torch.Tensor],
        params: list[Any],
        original: Callable[..., None],
    ) -> None:
        """Update as DeepSpeed, one parameter after the other."""
        for param in (param for param in params if param.requires_grad):
            part, number = self._gradient(param, is_read=True, is_put_back=True)
            full = update(self._upstream.gather_part(param, part), param)
            begin = self._upstream.part_begin(param, part.numel())
            # Elements of the partition beyond the tensor's end are padding.
            flat = full.flatten()
            count = max(0, min(part.numel(), flat.numel() - begin))
            if count:
                part.narrow(0, 0, count).copy_(flat.narrow(0, begin, count))
            self._upstream.put_back_gradient(number)


def set_local_gradient(upstream: Upstream, value: torch.Tensor, param: Any) -> None:
    """Set a gradient as DeepSpeed, also for a parameter whose shard is on the drive."""
    if not param.requires_grad:
        return
    _check_local(value, param)
    if upstream.offloads_states:
        upstream.note_norm(param, upstream.norm_of(value))
    part, number = upstream.gradient_part(param)
    part.data.copy_(value.flatten().data)
    if upstream.is_swapped(number):
        upstream.put_back_gradient(number)


def set_local_state(upstream: Upstream, value: torch.Tensor, param: Any, state: str | None) -> None:
    """Set a master weight or state as DeepSpeed, also if the parameter is on the drive."""
    if not param.requires_grad:
        return
    _check_local(value, param)
    part, number = upstream.state_part(param, state)
    part.data.copy_(value.flatten().data)
    if upstream.is_swapped(number):
        upstream.put_back_state(number)


def _check_local(value: torch.Tensor, param: Any) -> None:
    """Compare lengths; DeepSpeed uses `ds_tensor`, which is empty while it is on the drive."""
    numel = param.partition_numel()
    if value.numel() != numel:
        raise ValueError(
            f"cannot set this rank's part of a parameter of shape {tuple(param.ds_shape)}: it has "
            f"{numel} elements and the value has {value.numel()}. Pass only this rank's part; "
            "safe_set_full_fp32_param and similar functions take whole tensors"
        )
