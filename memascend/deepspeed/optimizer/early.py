"""Steps of the ZeRO-3 optimizer that begin during backward, where nothing waits for all gradients.

Without clipping a gradient is multiplied by what is known before backward. So a tile can be stepped
as soon as its gradients are complete, unless the step is then not made: DeepSpeed leaves one out
whose norm is not finite. Early steps lie beside the old values until `step()` has decided; what
they were computed from is compared with what is true then.

A gradient is used up by an early step, so whoever changes what it is computed from is refused. Two
whole steps are watched first: where a script changes or reads anything between backward and step,
nothing is ever early, and where a parameter got no gradient its tiles are not: the step after may
work on the gradient of the step before.
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
from memascend.errors import GradientGoneError, StoreFullError
from memascend.nvme.resident import ResidentStore
from memascend.streaming.early import Begins, EarlyPart, EarlySteps, leave_some
from memascend.streaming.gradients import GradientSpool
from memascend.streaming.sub_groups import Member, SubGroups, make_anew
from memascend.streaming.tiles import Tiles
from memascend.streaming.updates import EarlyStep, early_key
from memascend.streaming.window import TilePlaces

log = logging.getLogger(__name__)

#: Of a sub-group, what a step is computed from, by name.
Basis = dict[str, Any]
_HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay", "bias_correction")
#: Steps before the first early one. What happens in every step, or every other, shows in so many.
WATCHED_COUNT = 2


class StepsEarly(StepsBehind):
    """Has tiles stepped while backward goes on, and hands them to the step or forgets them."""

    spool: GradientSpool
    groups: SubGroups
    clip_grad: float
    _fused: FusedAdam | None
    _early: EarlySteps | None = None  # None: no tile is stepped early
    _early_basis: Sequence[Basis] = ()  # of the coming step; empty: no gradient of it has come
    _doubt = ""  # why nothing of the coming step is early any more
    _watched_count = 0
    _arrived: set[tuple[str, int]]  # gradients of the coming step: sub-group and offset
    _may_miss: set[tuple[str, int]]  # that did not come in some step
    _early_keys: frozenset[str] = frozenset()  # that have second values
    #: Tiles of all steps that were stepped during backward.
    early_tile_count = 0

    def _set_up_early(self, tiles: Tiles) -> None:
        """Make ready, where the configuration asks for it and this optimizer allows it."""
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
            run=runtime.walk.run,
            new_event=runtime.new_event,
        )

    def _why_never_early(self) -> str:
        """Return why no tile of this run can be stepped early; empty where some can."""
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
        """Have every value new that the last step makes, and none in the making of the next one.

        Raises:
            StoreError: The step failed; raised once. `integrity` says so from its start on.
        """
        super().finish_walk()
        if self._early is not None:
            self._early.close()

    def forget_early(self, reason: str) -> None:
        """Forget what was stepped early, or read: some value it rests on is about to change."""
        if self._early is None:
            self.stream.forget_ahead()
            return
        if not self._early_basis:
            return  # nothing has come for the coming step
        self._early.forget()
        self._doubt = self._doubt or reason
        self._stop_if_watched(reason)

    def note_look(self) -> None:
        """Note that the script reads a gradient, which may be gone another time."""
        self._stop_if_watched("gradients are read")

    def step(self, closure: Any = None) -> None:
        """Step as upstream; early tiles are the step's, or nobody's.

        Raises:
            GradientGoneError: It is not the step that was begun; nothing has changed.
        """
        try:
            super().step(closure)
        finally:
            self._end_step()

    def _end_step(self) -> None:
        """Forget all that was for the coming step."""
        if self._early is not None:
            self._early.forget()
            self._arrived.clear()
        self._early_basis, self._doubt = (), ""

    def tile_places(self, name: str, offset: int) -> TilePlaces | None:
        """Return where a gradient goes that the coming step works on; None: to the drive."""
        if self._early is None:
            return None
        if (name, offset) in self._arrived:
            if self.micro_step_id == 0:  # another backward pass takes the place of the one before
                self._end_step()
            else:
                self._stop_if_watched("another backward pass is added to a last one")
        if not self._early_basis:
            self._early_basis = self._basis(self._coming_scale())
            parts = [] if self._is_watched else self._early_parts()
            if self._early is not None:  # there is room
                self._early.begin(parts)
        return None if self._early is None else self._early.places(name, offset)

    def note_final(self, name: str, offset: int) -> None:
        """Note that a gradient is what the coming step works on; read the first tiles of that."""
        if self._early is None:
            if not self.integrity.is_torn:
                self.stream.read_ahead(self._walk_names())
        else:
            self._arrived.add((name, offset))
            self._early.note()

    # -- the step that is made -------------------------------------------------------------------

    def _take_early(self) -> tuple[Begins, str]:
        """Return where tiles begin that the coming step has already, or why it has none."""
        if self._early is None or not self._early_basis:
            return {}, ""
        changed = _difference(self._early_basis, self._basis(float(self.loss_scale)))
        reason = self._doubt or (changed and f"{changed} between backward and step()")
        if reason:
            self._early.close()
        else:
            self._early.finish()
        begins, error = self._early.take(self.spool.bring_back)
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
        """Refuse a step that needs a gradient which is gone.

        Raises:
            GradientGoneError: Nothing has changed.
        """
        for number, flat in enumerate(self.fp32_partitioned_groups_flat):
            tile_numel = self.groups.begins(flat.ds_id).step
            stepped = early.get(flat.ds_id, ())
            for offset, begin in self.spool.away(flat.ds_id):
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
        """Whether it is still to be shown that nobody needs gradients but the step."""
        return self._watched_count < WATCHED_COUNT

    def _stop_if_watched(self, reason: str) -> None:
        """Step nothing early in this run where a script needs what is then not there."""
        if self._early is not None and self._is_watched:
            if dist.get_rank() == 0:
                key = "streaming.optimizer.during_backward"
                log.warning("memascend: %s has no effect from now on: %s", key, reason)
            self._discard_early()

    def _coming_scale(self) -> float:
        """Return the loss scale that the coming step divides by, if it is made.

        Upstream brings the scale forward first: where it grows, the gradients have the one before.
        """
        if self.custom_loss_scaler:
            return float(self.loss_scale)
        scaler = copy.copy(self.loss_scaler)
        scaler.consecutive_hysteresis = False  # it says so in the log
        scaler.update_scale(False)
        return float(scaler.cur_scale)

    def _basis(self, loss_scale: float) -> list[Basis]:
        """Return what a step would be computed from now."""
        numbers = range(len(self.fp16_groups))
        states = [self.optimizer.state.get(flat, {}) for flat in self.fp32_partitioned_groups_flat]
        return [
            {
                "step": states[number].get("step"),
                "loss_scale": loss_scale,
                "gradient_clipping": self.clip_grad,
                # A copy: a list of betas may be changed in place.
                **{name: copy.deepcopy(self._group(number)[name]) for name in _HYPERPARAMETERS},
            }
            for number in numbers
        ]

    def _group(self, sub_group_id: int) -> Any:
        return self.optimizer.param_groups[self.sub_group_to_group_id[sub_group_id]]

    def _early_parts(self) -> list[EarlyPart]:
        """Return the sub-groups that may be stepped early, with room for their new values."""
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
        """Yield parameter, offset and elements of each gradient that can come."""
        offset = 0
        for param in self.fp16_groups[sub_group_id]:
            numel = param.ds_tensor.ds_numel
            # A rank that has nothing of a parameter but padding gets no gradient of it.
            if numel * self._get_param_partition_rank(param) < param.ds_numel:
                yield param, offset, numel
            offset += numel

    def _may_be_early(self, sub_group_id: int) -> bool:
        """Return whether a sub-group lies on the drive, where two of its values can lie."""
        group = self.groups.group(self.fp32_partitioned_groups_flat[sub_group_id].ds_id)
        store = self._resident_store()
        in_memory = sum(store.memory_of(key=key) for key in group.all_keys)
        are_stored = all(member.key is not None for member in self._members(sub_group_id))
        return are_stored and not group.fills and in_memory == 0

    def _has_room(self, parts: list[EarlyPart]) -> bool:
        """Find room for new values; without any nothing is early any more."""
        assert self._early is not None
        store = self._resident_store()
        keys = self._keys_of(parts)
        # A key of which a write failed is readable again once it is made anew.
        reserve = functools.partial(make_anew, store) if self._early.has_failed else store.reserve
        self._early_keys |= set(keys)
        try:
            for key in keys:
                reserve(key=early_key(key), nbytes=store.nbytes(key=key))
        except StoreFullError as error:
            log.warning(
                "memascend: streaming.optimizer.during_backward has no effect from now on: the "
                "drive has no room for second values of what a step changes. %s",
                error,
            )
            self._discard_early()
            return False
        self._early.has_failed = False
        return True

    def _keys_of(self, parts: list[EarlyPart]) -> list[str]:
        """Return the keys that these sub-groups' steps give new values."""
        names = [part.step.name for part in parts]
        members = [member for part in parts for member in part.step.members]
        of_states = [key for name in names for key in self.groups.group(name).all_keys]
        return of_states + [member.key for member in members if member.key is not None]

    def _discard_early(self) -> None:
        """Step nothing early any more, and give the drive's space back."""
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
        """Return whether a step may go on behind its caller, if it is one of tiles alone."""
        raise NotImplementedError


def _difference(before: Sequence[Basis], now: Sequence[Basis]) -> str:
    """Return the first of what is not as it was."""
    for number, (old, new) in enumerate(zip(before, now, strict=True)):
        for name, value in old.items():
            if value != new[name]:
                return f"{name} of sub-group {number} went from {value} to {new[name]}"
    return ""
