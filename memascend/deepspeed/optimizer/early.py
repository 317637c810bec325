"""Steps of the ZeRO-3 optimizer that begin during backward, where nothing waits for all gradients.

Without clipping a gradient is multiplied by what is known before backward. So a tile can be stepped
as soon as its gradients are complete, unless the step is then not made: DeepSpeed leaves one out
whose norm is not finite, a script may call `zero_grad` instead, or change the learning rate. Early
steps lie beside the old values until `step()` has decided; what they were computed from is compared
with what is true then.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Sequence
from typing import Any

from deepspeed import comm as dist

from memascend.deepspeed.optimizer.behind import StepsBehind
from memascend.deepspeed.optimizer.fused_adam import FusedAdam
from memascend.errors import StoreFullError
from memascend.nvme.resident import ResidentStore
from memascend.streaming.early import Begins, EarlyPart, EarlySteps
from memascend.streaming.gradients import GradientSpool
from memascend.streaming.sub_groups import Member, SubGroups, make_anew
from memascend.streaming.updates import EarlyStep, early_key

log = logging.getLogger(__name__)

#: Of a sub-group, what a step is computed from: its number, factor and clipping of gradients, the
#: rest.
Basis = tuple[int, float, float, tuple[Any, ...]]
_HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay", "bias_correction")


class StepsEarly(StepsBehind):
    """Has tiles stepped while backward goes on, and hands them to the step or forgets them."""

    spool: GradientSpool
    groups: SubGroups
    clip_grad: float
    _fused: FusedAdam | None
    _early: EarlySteps | None = None  # None: no tile is stepped early
    _early_basis: Sequence[Basis] = ()  # of the coming step; empty: nothing of it is early
    _is_early_over = False  # nothing more of the coming step is to be early
    _early_keys: frozenset[str] = frozenset()  # that have second values
    #: Tiles of all steps that were stepped during backward.
    early_tile_count = 0

    def _set_up_early(self) -> None:
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
        self._early = EarlySteps(
            stream=self.stream, is_stored=self._has_gradients, run=runtime.walk.run
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

    def forget_early(self) -> None:
        """Forget what was stepped early: some value it was computed from is about to change."""
        self._is_early_over = True
        self._early_basis = ()
        if self._early is not None:
            self._early.forget()

    def step(self, closure: Any = None) -> None:
        """Step as upstream; early tiles are the step's, or nobody's."""
        try:
            super().step(closure)
        finally:
            self.forget_early()
            self._is_early_over = False

    def note_final(self, name: str, offset: int) -> None:
        """Note that a gradient is what the coming step works on."""
        if self._early is None or self._is_early_over:
            return
        if not self._early_basis:
            parts = self._early_parts()
            if not parts:
                self._is_early_over = True
                return
            self._early_basis = self._basis()
            self._early.begin(parts)
        self._early.note(name, offset)

    def _take_early(self) -> Begins:
        """Return where tiles begin that the step which is now being made has already."""
        if self._early is None or not self._early_basis:
            return {}
        self._early.close()
        begins, error = self._early.take()
        if error is not None:
            log.warning("memascend: tiles stepped during backward are stepped again: %s", error)
        return begins if self._early_basis == self._basis() else {}

    def _basis(self) -> list[Basis]:
        """Return what a step would be computed from now."""
        return [
            (
                self.optimizer.state[self.fp32_partitioned_groups_flat[number]]["step"],
                self._factor_unclipped(),
                self.clip_grad,
                # A copy: a list of betas may be changed in place.
                copy.deepcopy(tuple(self._group(number)[name] for name in _HYPERPARAMETERS)),
            )
            for number in range(len(self.fp16_groups))
        ]

    def _factor_unclipped(self) -> float:
        return 1.0 / float(self.loss_scale)

    def _group(self, sub_group_id: int) -> Any:
        return self.optimizer.param_groups[self.sub_group_to_group_id[sub_group_id]]

    def _early_parts(self) -> list[EarlyPart]:
        """Return the sub-groups that may be stepped early, with room for their new values."""
        numbers = range(len(self.fp16_groups))
        flats = self.fp32_partitioned_groups_flat
        fused = self._fused
        if fused is None or self.clip_grad > 0 or self.integrity.is_torn:
            return []
        if self.spool.needs_slots(self.gradient_accumulation_dtype):
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
        return chosen if self._has_room(chosen) else []

    def _early_part(self, sub_group_id: int, update: Any) -> EarlyPart:
        name = self.fp32_partitioned_groups_flat[sub_group_id].ds_id
        members = self._members(sub_group_id)
        params = self.fp16_groups[sub_group_id]
        return EarlyPart(
            step=EarlyStep(name, update, self._factor_unclipped(), members),
            begins=self.groups.begins(name),
            # A rank that has nothing of a parameter but padding gets no gradient of it.
            places=[
                (member.offset, member.numel)
                for member, param in zip(members, params, strict=True)
                if member.numel * self._get_param_partition_rank(param) < param.ds_numel
            ],
        )

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

    def _has_gradients(self, name: str, begin: int) -> bool:
        return self.spool.is_stored(name, begin, self.groups.begins(name).step)

    def _discard_early(self) -> None:
        """Step nothing early any more, and give the drive's space back."""
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
