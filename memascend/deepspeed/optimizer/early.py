"""Early steps of the ZeRO-3 optimizer: tiles are stepped during backward.

Without clipping the gradient factor is known before backward, so a tile can be stepped as soon as
its gradients are complete. DeepSpeed may still skip the step, if the norm is not finite. So early
steps write their results beside the old values. `step()` compares the hyperparameters and the loss
scale with those that the early steps used, and takes or discards the results.

An early step consumes its gradients, so a step with changed hyperparameters is an error. The first
two steps are only watched. If the script changes or reads anything between backward and step in
them, early steps are turned off for the run. If a parameter got no gradient in some step, its tiles
are not early any more: its next step may use the gradient of the step before again.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from deepspeed import comm as dist

from memascend.base.sizes import LEFT_ONE_OF
from memascend.deepspeed.optimizer.behind import StepsBehind
from memascend.deepspeed.optimizer.fused_adam import FusedAdam
from memascend.deepspeed.optimizer.locked import locked
from memascend.errors import GradientGoneError, StoreFullError
from memascend.nvme.resident import ResidentStore
from memascend.streaming.gradients.accumulation import TilePlaces
from memascend.streaming.gradients.stream import GradientStream
from memascend.streaming.optimizer.during_backward import Begins, EarlyPart, EarlySteps, leave_some
from memascend.streaming.optimizer.sub_groups import Member, SubGroups, make_anew
from memascend.streaming.optimizer.tiles import Tiles
from memascend.streaming.optimizer.updates import EarlyStep, early_key

log = logging.getLogger(__name__)

#: The inputs of a sub-group's step besides tensors, by name.
Basis = dict[str, Any]
_HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay", "bias_correction")
#: Steps before the first early one: enough to see an event of every step or of every other step.
WATCHED_COUNT = 2


class StepsEarly(StepsBehind):
    """Steps tiles during backward, and gives the results to the step or discards them."""

    gradient_stream: GradientStream
    groups: SubGroups
    clip_grad: float
    _fused: FusedAdam | None
    _early: EarlySteps | None = None  # None: no tile is stepped early
    _early_basis: Sequence[Basis] = ()  # of the coming step; empty: no gradient has arrived yet
    _doubt = ""  # why the coming step can have no early tiles
    _watched_count = 0
    _arrived: set[tuple[str, int]]  # gradients of the coming step: sub-group and offset
    _may_miss: set[tuple[str, int]]  # gradients that did not arrive in some step
    _early_keys: frozenset[str] = frozenset()  # keys that have a second key for early results
    #: Tiles stepped during backward, summed over all steps.
    early_tile_count = 0

    def _set_up_early(self, tiles: Tiles) -> None:
        """Turn early steps on if they are configured and this optimizer allows them."""
        runtime = self.attachment.runtime
        if not runtime.config.streaming.optimizer.during_backward:
            return
        reason = self._why_never_early()
        if reason:
            if dist.get_rank() == 0:
                key = "streaming.optimizer.during_backward"
                log.warning("memascend: %s has no effect: %s", key, reason)
            return
        self._arrived, self._may_miss = set(), set()
        self._early = EarlySteps(
            stream=self.stream,
            tiles=tiles,
            run=runtime.background.run,
            new_event=runtime.new_event,
            use_device=runtime.background.use_device,
        )

    def _why_never_early(self) -> str:
        """Return why this run cannot step tiles early; empty if it can."""
        if self.clip_grad > 0:
            return (
                f"gradient_clipping is {self.clip_grad}, and no gradient can be clipped before the "
                "last one has come. Set it to 0 (max_grad_norm=0 in a Trainer)"
            )
        if self._fused is None:
            name = type(self.optimizer).__name__
            return f"{name} does not step in one pass (streaming.optimizer.fused)"
        if not self.streams_gradients or self._param_swapper is None:
            return "parameters and gradients are not streamed from and to the drive"
        return ""

    def finish_walk(self) -> None:
        """Wait until the last step has written every value; stop early steps and wait for them.

        Raises:
            StoreError: The step failed; raised once. `integrity` is torn from its start on.
        """
        super().finish_walk()
        with self.attachment.runtime.lock:  # hooks open early steps while another thread looks
            if self._early is not None:
                self._early.close()

    @locked
    def forget_early(self, reason: str) -> None:
        """Discard early steps and tiles read ahead: one of their inputs is about to change."""
        if self._early is None:
            self.stream.forget_ahead()
            return
        if not self._early_basis:
            return  # no gradient of the coming step has arrived
        self._early.forget()
        self._doubt = self._doubt or reason
        self._stop_if_watched(reason)

    @locked
    def note_look(self) -> None:
        """Note that the script reads a gradient: an early step would have consumed it."""
        self._stop_if_watched("gradients are read")

    def step(self, closure: Any = None) -> None:
        """Step as upstream; take the early steps or discard them.

        Raises:
            GradientGoneError: The inputs differ from those of the early steps, which have consumed
                their gradients. Nothing has changed.
        """
        try:
            super().step(closure)
        finally:
            self._end_step()

    @locked
    def _end_step(self) -> None:
        """Reset the state kept for the coming step."""
        if self._early is not None:
            self._early.forget()
            self._arrived.clear()
        self._early_basis, self._doubt = (), ""

    def tile_places(self, name: str, offset: int) -> TilePlaces | None:
        """Return tile memory for a gradient of the coming step; None: write it to the drive."""
        if self._early is None:
            return None
        if (name, offset) in self._arrived:
            if self.micro_step_id == 0:  # this backward pass replaces the previous one
                self._end_step()
            else:
                self._stop_if_watched("a backward pass added to a gradient that was final")
        if not self._early_basis:
            self._early_basis = self._basis(self._coming_scale())
            parts = [] if self._is_watched else self._early_parts()
            if self._early is not None:  # the drive has room
                self._early.begin(parts)
        return None if self._early is None else self._early.places(name, offset)

    def note_final(self, name: str, offset: int) -> None:
        """Note that a gradient is final; step tiles that are complete, or read tiles ahead."""
        if self._early is None:
            if not self.integrity.is_torn:
                self.stream.read_ahead(self._walk_names())
        else:
            self._arrived.add((name, offset))
            self._early.note()

    # -- in step() -------------------------------------------------------------------------------

    def _take_early(self) -> tuple[Begins, str]:
        """Return (begins of the tiles stepped early, why they were discarded or empty)."""
        if self._early is None or not self._early_basis:
            return {}, ""
        changed = _difference(self._early_basis, self._basis(float(self.loss_scale)))
        reason = self._doubt or (changed and f"{changed} between backward and step()")
        if reason:
            self._early.close()
        else:
            self._early.finish()
        begins, error = self._early.take(self.gradient_stream.bring_back)
        if error is not None and not reason:
            reason = f"a tile could not be stepped during backward ({error})"
        elif changed:
            self._stop_if_watched(reason)
        if self._early is not None:
            self._note_missing()
        return ({}, reason) if reason else (begins, "")

    def _note_missing(self) -> None:
        for number, flat in enumerate(self.fp32_partitioned_groups_flat):
            self._may_miss |= {
                (flat.ds_id, offset) for _, offset, _ in self._gradient_places(number)
            } - self._arrived
        self._watched_count += 1

    def _check_gradients(self, early: Begins, reason: str) -> None:
        """Check that every tile still to be stepped has its gradient.

        Raises:
            GradientGoneError: An early step consumed it. Nothing has changed.
        """
        for number, flat in enumerate(self.fp32_partitioned_groups_flat):
            tile_numel = self.groups.begins(flat.ds_id).step
            stepped = early.get(flat.ds_id, ())
            for offset, begin in self.gradient_stream.away(flat.ds_id):
                if begin // tile_numel * tile_numel not in stepped:
                    why = reason or f"{self._name_of(number, offset)} got no gradient this time"
                    raise GradientGoneError(f"cannot make this step: {why}")
        if reason and self._early is not None:
            log.warning("memascend: no tile is stepped during backward this time: %s", reason)

    def _name_of(self, sub_group_id: int, offset: int) -> str:
        places = self._gradient_places(sub_group_id)
        param = next(param for param, begin, _ in places if begin == offset)
        return f"the parameter {self.param_names[param]}"

    # -- watching --------------------------------------------------------------------------------

    @property
    def _is_watched(self) -> bool:
        """Whether this is one of the first steps, in which the script is only watched."""
        return self._watched_count < WATCHED_COUNT

    def _stop_if_watched(self, reason: str) -> None:
        """Turn early steps off for this run if it is still being watched."""
        if self._early is not None and self._is_watched:
            if dist.get_rank() == 0:
                key = "streaming.optimizer.during_backward"
                log.warning("memascend: %s has no effect from now on: %s", key, reason)
            self._discard_early()

    def _coming_scale(self) -> float:
        """Return the loss scale that the coming step divides by, unless it overflows.

        Upstream updates the scale before it divides. So if the scale grows at this step, upstream
        divides by the new one, though the loss was multiplied by the old one.
        """
        if self.custom_loss_scaler:
            return float(self.loss_scale)
        scaler = copy.copy(self.loss_scaler)
        scaler.consecutive_hysteresis = False  # else the copy logs its update
        scaler.update_scale(False)
        return float(scaler.cur_scale)

    def _basis(self, loss_scale: float) -> list[Basis]:
        """Return the inputs of a step made now, for each sub-group."""
        numbers = range(len(self.fp16_groups))
        states = [self.optimizer.state.get(flat, {}) for flat in self.fp32_partitioned_groups_flat]
        return [
            {
                "step": states[number].get("step"),
                "loss_scale": loss_scale,
                "gradient_clipping": self.clip_grad,
                # Copied: the script may change a list of betas in place.
                **{name: copy.deepcopy(self._group(number)[name]) for name in _HYPERPARAMETERS},
            }
            for number in numbers
        ]

    def _group(self, sub_group_id: int) -> Any:
        return self.optimizer.param_groups[self.sub_group_to_group_id[sub_group_id]]

    def _early_parts(self) -> list[EarlyPart]:
        """Return the sub-groups to step early, with room reserved for their results."""
        numbers = range(len(self.fp16_groups))
        flats = self.fp32_partitioned_groups_flat
        fused = self._fused
        if fused is None or self.clip_grad > 0 or self.integrity.is_torn:
            return []
        states = [self.optimizer.state.get(flats[number], {}) for number in numbers]
        known = [self.groups.group(flats[number].ds_id).states for number in numbers]
        if any(
            fused.why_not(self._group(number), states[number], known[number]) for number in numbers
        ):
            return []
        coming = [(self._group(number), states[number]["step"] + 1) for number in numbers]
        chosen = [
            self._early_part(number, update)
            for number, update in zip(numbers, fused.early(coming), strict=True)
            if self._may_be_early(number)
        ]
        if self._may_overlap():
            chosen = leave_some(chosen, LEFT_ONE_OF)
        return chosen if self._has_room(chosen) else []

    def _early_part(self, sub_group_id: int, update: Any) -> EarlyPart:
        name = self.fp32_partitioned_groups_flat[sub_group_id].ds_id
        places = [(offset, numel) for _, offset, numel in self._gradient_places(sub_group_id)]
        return EarlyPart(
            step=EarlyStep(name, update, 1.0 / self._coming_scale(), self._members(sub_group_id)),
            begins=self.groups.begins(name),
            places=[place for place in places if (name, place[0]) not in self._may_miss],
            kept=[place for place in places if (name, place[0]) in self._may_miss],
        )

    def _gradient_places(self, sub_group_id: int) -> Iterator[tuple[Any, int, int]]:
        """Yield parameter, offset and elements of each gradient that can arrive."""
        offset = 0
        for param in self.fp16_groups[sub_group_id]:
            numel = param.ds_tensor.ds_numel
            # A rank whose shard is only padding gets no gradient.
            if numel * self._get_param_partition_rank(param) < param.ds_numel:
                yield param, offset, numel
            offset += numel

    def _may_be_early(self, sub_group_id: int) -> bool:
        """Return whether all values of a sub-group are on the drive, none in memory."""
        group = self.groups.group(self.fp32_partitioned_groups_flat[sub_group_id].ds_id)
        store = self._resident_store()
        in_memory = sum(store.memory_of(key=key) for key in group.all_keys)
        are_stored = all(member.key is not None for member in self._members(sub_group_id))
        return are_stored and not group.fills and in_memory == 0

    def _has_room(self, parts: list[EarlyPart]) -> bool:
        """Reserve room for early results; if the drive is full, turn early steps off."""
        assert self._early is not None
        store = self._resident_store()
        keys = self._keys_of(parts)
        # After a failed write a key is unreadable until it is created again.
        reserve = functools.partial(make_anew, store) if self._early.has_failed else store.reserve
        self._early_keys |= set(keys)
        try:
            for key in keys:
                reserve(key=early_key(key), nbytes=store.nbytes(key=key))
        except StoreFullError as error:
            log.warning(
                "memascend: streaming.optimizer.during_backward has no effect from now on: the "
                "drive has no room for the new values of a step beside the old ones. %s",
                error,
            )
            self._discard_early()
            return False
        self._early.has_failed = False
        return True

    def _keys_of(self, parts: list[EarlyPart]) -> list[str]:
        """Return the keys that the steps of these sub-groups write."""
        names = [part.step.name for part in parts]
        members = [member for part in parts for member in part.step.members]
        of_states = [key for name in names for key in self.groups.group(name).all_keys]
        return of_states + [member.key for member in members if member.key is not None]

    def _discard_early(self) -> None:
        """Turn early steps off and free their space on the drive."""
        if self._early is not None:
            self._early.forget()
        self._early = None
        store = self.attachment.runtime.store
        for key in self._early_keys if store is not None else ():
            store.discard(key=early_key(key))
        self._early_keys = frozenset()

    def _resident_store(self) -> ResidentStore:
        store: ResidentStore | None = self.attachment.runtime.store
        assert store is not None
        return store

    def _members(self, sub_group_id: int) -> list[Member]:
        """Return where the parameters of a sub-group are."""
        raise NotImplementedError

    def _may_overlap(self) -> bool:
        """Return whether a fused step may run in the background."""
        raise NotImplementedError


def _difference(before: Sequence[Basis], now: Sequence[Basis]) -> str:
    """Describe the first value that differs; empty if none does."""
    for number, (old, new) in enumerate(zip(before, now, strict=True)):
        for name, value in old.items():
            if value != new[name]:
                return f"{name} of sub-group {number} went from {value} to {new[name]}"
    return ""
