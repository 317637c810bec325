"""Whether Muon's updates are applied as they are made, which this rank decides for each sub-group.

They are without clipping, a loss scale or hooks of the optimizer, where all values of a sub-group
are on the drive, and the drive has room for second values and for saving the run beside them.
Otherwise updates are written, and read again by the walk.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from memascend.deepspeed.optimizer.fused_muon import update_of
from memascend.deepspeed.optimizer.plain_adam import why_not_plain_step
from memascend.deepspeed.optimizer.room import too_little_room
from memascend.deepspeed.optimizer.upstream import Upstream
from memascend.errors import StoreFullError
from memascend.plan.optimizers import MOMENTUM
from memascend.runtime import Runtime
from memascend.streaming.optimizer.applied import AppliedUpdates

log = logging.getLogger(__name__)


class Applying:
    """The choice of one optimizer."""

    def __init__(self, upstream: Upstream, runtime: Runtime) -> None:
        """Reserve nothing yet.

        Args:
            upstream: The optimizer.
            runtime: Owner of the streams and of the store.
        """
        self._upstream, self._runtime = upstream, runtime
        self._is_full = False
        #: The second values; None if there are none, or none any more.
        self.values: AppliedUpdates | None = None
        if self._is_possible:
            assert runtime.store is not None
            self.values = AppliedUpdates(
                stream=runtime.optimizer, store=runtime.store, state=MOMENTUM
            )

    @property
    def _is_possible(self) -> bool:
        return self._runtime.store is not None and self._runtime.config.streaming.optimizer.fused

    @property
    def is_wanted(self) -> bool:
        """Whether the coming step may apply updates as they are made; the same on every rank."""
        upstream = self._upstream
        return (
            self._is_possible
            and not upstream.norm_max
            and upstream.dtype != torch.float16
            and upstream.loss_scale == 1.0
        )

    def choose(self, numbers: Mapping[str, int]) -> set[str]:
        """Return the sub-groups that may, of those given with their numbers; reserve their room.

        `settle` has to follow.
        """
        if not self.is_wanted or self.values is None or why_not_plain_step(self._upstream.base):
            return set()
        chosen = {name for name, number in numbers.items() if self.may_lie_beside(name, number)}
        self._is_full = not all(self._has_room(name, numbers[name]) for name in chosen)
        return set() if self._is_full else chosen

    def settle(self, *, is_refused: bool) -> None:
        """Give second values up if this rank has no room for them, or another one refuses them."""
        if self._is_full or is_refused:
            self.discard()
            self.values = None

    def discard(self) -> None:
        """Free the drive space of second values."""
        if self.values is not None:
            self.values.discard()

    def may_lie_beside(self, name: str, number: int) -> bool:
        """Return whether a sub-group of matrices may have second values."""
        if self.values is None:
            return False
        group = self._runtime.optimizer.groups.group(name)
        # A fill has no bytes: before the first step there is no momentum to keep.
        is_plain = not group.is_coded(MOMENTUM) and not group.fills
        is_plain = is_plain and update_of(self._upstream.hyperparameters(number)) is not None
        return is_plain and self.values.is_on_drive(name, self._upstream.members(number))

    def _has_room(self, name: str, number: int) -> bool:
        assert self.values is not None
        reason = ""
        is_demanded = self._runtime.config.streaming.optimizer.during_backward is True
        try:
            is_new = self.values.reserve(name, self._upstream.members(number))
            if is_new and not is_demanded:  # who demands second values may have a full drive
                reason = too_little_room(self._runtime)
        except StoreFullError as error:
            reason = f"the drive has no room for new weights beside the old ones. {error}"
        if reason:
            log.log(
                logging.WARNING if is_demanded else logging.INFO,
                "memascend: Muon's updates are written from now on, and read again: %s",
                reason,
            )
        return not reason
