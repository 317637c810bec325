"""Work ahead of the coming step: tiles are stepped during backward, or the first ones are read.

Without clipping the gradient factor is known before backward, so a tile can be stepped as soon as
its gradients are complete. DeepSpeed may still skip the step, if the norm is not finite. So early
steps write their results beside the old values. `step()` compares the hyperparameters and the loss
scale with those that the early steps used, and takes or discards the results.

With clipping the factor is the same in every step whose norm is within the limit, so it is guessed
(guess.py), and gradients go to the drive, too: after a wrong guess, or any other change, all tiles
are stepped from the old values. A run that finds out by itself whether early steps pay (worth.py)
does so with and without clipping.

If early steps are demanded without clipping, they consume their gradients, so a step with changed
hyperparameters is an error. The first two steps are only watched. If the script changes or reads
anything between backward and step in them, early steps are turned off for the run.

If a parameter got no gradient in some step, its tiles are not early any more: its next step may use
the gradient of the step before again.

Muon's matrices (muon.py) are stepped so if it is demanded, nothing is clipped, and there is one
rank: tiles get updates instead of gradients.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from deepspeed import comm as dist

from memascend.base.sizes import LEFT_ONE_OF
from memascend.deepspeed.optimizer.fused_adam import FusedAdam
from memascend.deepspeed.optimizer.fused_muon import FusedMuon
from memascend.deepspeed.optimizer.guess import Guess
from memascend.deepspeed.optimizer.room import too_little_room
from memascend.deepspeed.optimizer.upstream import Upstream
from memascend.deepspeed.optimizer.worth import Worth
from memascend.errors import GradientGoneError, StoreFullError
from memascend.nvme.resident import ResidentStore
from memascend.runtime import Runtime
from memascend.streaming.gradients.bypass import DriveBypass
from memascend.streaming.optimizer.during_backward import (
    EarlyPart,
    TilesDuringBackward,
    leave_some,
)
from memascend.streaming.optimizer.step import Basis, Begins, Step
from memascend.streaming.optimizer.stream import OptimizerStream
from memascend.streaming.optimizer.sub_group_step import EarlyStep, as_number, early_key
from memascend.streaming.optimizer.sub_groups import SubGroups, make_anew

log = logging.getLogger(__name__)

#: Reasons to discard a guess.
CLIPPED = "the norm is above gradient_clipping"
ADDED = "a backward pass added to a gradient that was final"
KEY = "streaming.optimizer.during_backward"
#: Those of Adam, and of Muon's matrices.
_HYPERPARAMETERS = (
    *("lr", "betas", "eps", "weight_decay", "bias_correction"),
    *("momentum", "ns_method"),
)
#: Steps before the first early one: enough to see an event of every step or of every other step.
WATCHED_COUNT = 2


class WorkAhead:
    """The calls that work ahead of a step gets. There is none before there are tiles, or here."""

    def bypass_of(self, step: Step, name: str, offset: int) -> DriveBypass | None:
        """Return None: gradients go to the drive."""
        return None

    def note_final(self, step: Step, name: str, offset: int) -> None:
        """Do nothing."""

    def note_look(self) -> None:
        """Do nothing."""

    def drop(self, step: Step, reason: str) -> None:
        """Do nothing."""

    def take_results(self, step: Step) -> tuple[Begins, str]:
        """Return no tiles."""
        return {}, ""

    def note_decided(self, step: Step, reason: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def restart(self) -> None:
        """Do nothing."""

    def discard(self) -> None:
        """Do nothing."""

    def may_be_early(self, number: int) -> bool:
        """Return that nothing speaks against early steps of a sub-group."""
        return True

    def reserve(self, steps: Iterable[EarlyStep]) -> None:
        """Do nothing: no second values are of this object."""

    def note_failure(self) -> None:
        """Do nothing."""


class AfterBackward(WorkAhead):
    """All tiles are stepped after backward; the first ones are read during backward."""

    def __init__(self, stream: OptimizerStream) -> None:
        """Wrap the stream that reads tiles."""
        self._stream = stream

    def note_final(self, step: Step, name: str, offset: int) -> None:
        """Read the first tiles of the step, in the order of the last one."""
        if not step.is_mixed:
            self._stream.prefetch(step.order)

    def drop(self, step: Step, reason: str) -> None:
        """Drop the tiles that were read."""
        self._stream.drop_prefetched()


class DuringBackward:
    """Steps tiles during backward, and gives the results to the step or discards them."""

    def __init__(
        self,
        *,
        upstream: Upstream,
        runtime: Runtime,
        fused: FusedAdam | FusedMuon,
        overlaps: Callable[[], bool],
        turn_off: Callable[[], None],
        after_backward: WorkAhead,
        worth: Worth | None = None,
    ) -> None:
        """Start without a gradient.

        Args:
            upstream: The optimizer.
            runtime: Owner of the streams.
            fused: The optimizer's fused steps.
            overlaps: Returns whether a fused step may run in the background.
            turn_off: Called when this object must not be used any more.
            after_backward: Work ahead of steps that do not begin during backward.
            worth: Finds out whether early steps pay; None: they are demanded.
        """
        self._upstream, self._runtime, self._fused = upstream, runtime, fused
        self._overlaps, self._turn_off = overlaps, turn_off
        # Other steps than guessed ones read tiles ahead. None: gradients are used up.
        self._guess = Guess(worth) if worth is not None or upstream.norm_max > 0 else None
        self._is_demanded = worth is None
        runtime.guesses = None if self._guess is None else self._guess.counts
        self._after_backward = after_backward
        self._has_parts = False  # whether tiles of the coming step may be stepped early
        self._tiles = TilesDuringBackward(
            stream=runtime.optimizer, background=runtime.background, new_event=runtime.new_event
        )
        self._watched_count = 0
        self._may_miss: set[tuple[str, int]] = set()  # gradients that did not arrive in some step
        self._keys: frozenset[str] = frozenset()  # keys that have a second key for early results

    @property
    def _groups(self) -> SubGroups:
        return self._runtime.optimizer.groups

    @property
    def _store(self) -> ResidentStore:
        store: ResidentStore | None = self._runtime.store
        assert store is not None
        return store

    # -- backward --------------------------------------------------------------------------------

    def bypass_of(self, step: Step, name: str, offset: int) -> DriveBypass | None:
        """Return tile memory for a gradient that is about to be final; None: to the drive."""
        if (name, offset) in step.arrived:
            if self._stop_if_watched(ADDED):
                return None
            if self._guess is not None:  # else gradients that are kept may arrive again
                step.doubt = step.doubt or ADDED
        if not step.basis:
            if self._guess is not None and self._guess.is_over:
                self._stop()
                return None
            step.basis = self._basis(self._upstream.coming_loss_scale())
            parts = self._early_parts() if self._may_begin(step) else []
            if parts and not self._has_room(parts):
                return None
            self._has_parts = bool(parts)
            if parts:
                self._after_backward.drop(step, "")
            self._tiles.expect(parts, keeps_gradients=self._guess is not None)
        return self._tiles.bypass_of(name, offset)

    def note_final(self, step: Step, name: str, offset: int) -> None:
        """Note that a gradient is final; step tiles that are complete."""
        step.arrived.add((name, offset))
        self._tiles.note_copied()
        if not self._has_parts:
            self._after_backward.note_final(step, name, offset)

    def _may_begin(self, step: Step) -> bool:
        """Return whether tiles of a step may be stepped early, as far as earlier steps tell."""
        may_begin = not self._is_watched if self._guess is None else self._guess.wants()
        # A limit of the norm that a script set behind the start.
        is_clipped = isinstance(self._fused, FusedMuon) and self._upstream.norm_max > 0
        return may_begin and not is_clipped and not step.is_mixed

    def note_look(self) -> None:
        """Note that the script reads a gradient: an early step would have consumed it."""
        self._after_backward.note_look()
        self._stop_if_watched("gradients are read")

    def drop(self, step: Step, reason: str) -> None:
        """Discard early steps: one of their inputs is about to change."""
        self._after_backward.drop(step, reason)
        if step.is_mixed:  # a write of second values may have failed in the walk
            self._tiles.has_failed = True
        if not step.basis:
            return  # no gradient of the step has arrived
        self._tiles.drop()
        step.doubt = step.doubt or reason
        self._stop_if_watched(reason)

    # -- the step --------------------------------------------------------------------------------

    def take_results(self, step: Step) -> tuple[Begins, str]:
        """Return (begins of the tiles stepped early, why they were discarded or empty)."""
        if not step.basis:
            return {}, ""
        changed = _difference(step.basis, self._basis(self._loss_scale))
        reason = step.doubt or (changed and f"{changed} between backward and step()")
        if self._has_parts:
            why = self._why_not_fused()
            reason = reason or (why and f"the optimizer has to make this step by itself: {why}")
            reason = reason or ("" if self._is_within(step) else CLIPPED)
        if reason:
            self._tiles.close()
        else:
            self._tiles.finish()
        begins, error = self._tiles.take_results(self._runtime.gradients.put_back)
        if error is not None and not reason:
            reason = f"a tile could not be stepped during backward ({error})"
        elif changed and self._stop_if_watched(reason):
            return {}, reason
        self._note_missing(step)
        return ({}, reason) if reason else (begins, "")

    def _note_missing(self, step: Step) -> None:
        for number, name in enumerate(self._upstream.names):
            ranges = gradient_ranges(self._upstream, number)
            self._may_miss |= {(name, offset) for _, offset, _ in ranges} - step.arrived
        self._watched_count += 1

    def _is_within(self, step: Step) -> bool:
        """Return whether nothing is clipped: the factor is the one of early steps."""
        return as_number(step.factor) == 1.0 / self._loss_scale

    @property
    def _loss_scale(self) -> float:
        """The loss scale that the step divides by; DeepSpeed updates it behind Muon's updates."""
        is_coming = isinstance(self._fused, FusedMuon)
        return self._upstream.coming_loss_scale() if is_coming else self._upstream.loss_scale

    def note_decided(self, step: Step, reason: str) -> None:
        """Count a guess, and tell why no tile was stepped early, if there is a reason."""
        if self._guess is not None and step.basis:
            self._guess.note(
                is_within=self._is_within(step),
                was_guessed=self._has_parts,
                was_right=not reason,
            )
        if reason and (self._has_parts or self._guess is None):
            level = logging.WARNING if self._guess is None else logging.DEBUG
            log.log(level, "memascend: no tile is stepped during backward this time: %s", reason)

    def close(self) -> None:
        """Stop stepping, and return when nothing is in flight."""
        self._tiles.close()

    def restart(self) -> None:
        """Drop the early steps of a step that is over."""
        self._tiles.drop()
        self._after_backward.restart()

    # -- watching --------------------------------------------------------------------------------

    @property
    def _is_watched(self) -> bool:
        """Whether this is one of the first steps, in which the script is only watched.

        Guesses need none: no gradient is used up.
        """
        return self._guess is None and self._watched_count < WATCHED_COUNT

    def _stop_if_watched(self, reason: str) -> bool:
        """Turn early steps off for this run if it is still being watched; return whether it was."""
        if not self._is_watched:
            return False
        if dist.get_rank() == 0:
            log.warning("memascend: %s has no effect from now on: %s", KEY, reason)
        self._stop()
        return True

    def _stop(self) -> None:
        self._discard_own()
        self._turn_off()

    def discard(self) -> None:
        """Drop early steps, and free their space on the drive."""
        self._discard_own()
        self._after_backward.discard()

    def _discard_own(self) -> None:
        self._tiles.drop()
        for key in self._keys:
            self._store.discard(key=early_key(key))
        if self._keys:
            self._store.shrink()
        self._keys = frozenset()

    def _basis(self, loss_scale: float) -> list[Basis]:
        """Return the inputs of a step made now, for each sub-group."""
        upstream = self._upstream
        return [
            {
                "step": upstream.base.state.get(master, {}).get("step"),
                "loss_scale": loss_scale,
                "gradient_clipping": upstream.norm_max,
                # Copied: the script may change a list of betas in place.
                **{
                    name: copy.deepcopy(value)
                    for name, value in upstream.hyperparameters(number).items()
                    if name in _HYPERPARAMETERS
                },
            }
            for number, master in enumerate(upstream.masters)
        ]

    # -- the tiles to step early -----------------------------------------------------------------

    def _early_parts(self) -> list[EarlyPart]:
        """Return the sub-groups to step early."""
        upstream, fused = self._upstream, self._fused
        if not fused.is_fused:
            return []
        if self._why_not_fused():
            return []
        # Matrices of Muon count no steps.
        coming = [
            (upstream.hyperparameters(number), upstream.base.state.get(one, {}).get("step", 0) + 1)
            for number, one in enumerate(upstream.masters)
        ]
        chosen = [
            self._early_part(number, update)
            for number, update in enumerate(fused.early(coming))
            if self._may_be_early(number)
        ]
        return leave_some(chosen, LEFT_ONE_OF) if self._overlaps() else chosen

    def _why_not_fused(self) -> str:
        """Return why the optimizer must make the coming step by itself; empty: it need not."""
        upstream = self._upstream
        for number, master in enumerate(upstream.masters):
            values, states = upstream.base.state.get(master, {}), self._groups.group(master.ds_id)
            why = self._fused.why_not(upstream.hyperparameters(number), values, states.states)
            if why:
                return why
        return ""

    def _early_part(self, number: int, update: Any) -> EarlyPart:
        upstream = self._upstream
        name = upstream.masters[number].ds_id
        factor = 1.0 / upstream.coming_loss_scale()
        ranges = [(offset, numel) for _, offset, numel in gradient_ranges(upstream, number)]
        return EarlyPart(
            step=EarlyStep(name, update, factor, upstream.members(number)),
            begins=self._groups.begins(name),
            ranges=[one for one in ranges if (name, one[0]) not in self._may_miss],
            kept=[one for one in ranges if (name, one[0]) in self._may_miss],
        )

    def _may_be_early(self, number: int) -> bool:
        """Return whether all values of a sub-group are on the drive, none in memory."""
        group = self._groups.group(self._upstream.masters[number].ds_id)
        in_memory = sum(self._store.memory_of(key=key) for key in group.all_keys)
        are_stored = all(member.key is not None for member in self._upstream.members(number))
        is_free = self._after_backward.may_be_early(number)
        return is_free and are_stored and not group.fills and in_memory == 0

    def _has_room(self, parts: Sequence[EarlyPart]) -> bool:
        """Reserve room for early results; if the drive is full, turn early steps off.

        If they are not demanded, there has to be room for saving the run, too.
        """
        keys, store = self._keys_of(parts), self._store
        # After a failed write a key is unreadable until it is created again.
        reserve = functools.partial(make_anew, store) if self._tiles.has_failed else store.reserve
        if self._tiles.has_failed:
            self._after_backward.note_failure()
        self._keys |= set(keys)
        try:
            self._after_backward.reserve(part.step for part in parts)
            for key in keys:
                reserve(key=early_key(key), nbytes=store.nbytes(key=key))
            reason = "" if self._is_demanded else too_little_room(self._runtime)
        except StoreFullError as error:
            reason = f"the drive has no room for a step's new values beside the old ones. {error}"
        if reason:
            log.log(
                logging.WARNING if self._is_demanded else logging.INFO,
                "memascend: %s has no effect from now on: %s",
                KEY,
                reason,
            )
            self._stop()
            return False
        self._tiles.has_failed = False
        return True

    def _keys_of(self, parts: Sequence[EarlyPart]) -> list[str]:
        """Return the keys that the steps of these sub-groups write, but for those of matrices."""
        own = [part.step for part in parts if not self._groups.group(part.step.name).steps_updates]
        names = [step.name for step in own]
        members = [member for step in own for member in step.members]
        of_states = [key for name in names for key in self._groups.group(name).all_keys]
        return of_states + [member.key for member in members if member.key is not None]


#: Work ahead of a step; its methods take the step that collects gradients.
AheadOfStep = WorkAhead | DuringBackward


def gradient_ranges(upstream: Upstream, number: int) -> Iterator[tuple[Any, int, int]]:
    """Yield parameter, offset and elements of each gradient of a sub-group that can arrive."""
    offset = 0
    for param in upstream.params[number]:
        numel = param.ds_tensor.ds_numel
        # A rank whose shard is only padding gets no gradient.
        if upstream.part_begin(param, numel) < param.ds_numel:
            yield param, offset, numel
        offset += numel


def check_gradients(upstream: Upstream, runtime: Runtime, early: Begins, reason: str) -> None:
    """Check that every tile still to be stepped has its gradient.

    Args:
        upstream: The optimizer.
        runtime: Owner of the streams.
        early: Begins of the tiles that were stepped early.
        reason: Why there are none; empty if there is no reason.

    Raises:
        GradientGoneError: An early step consumed it. Nothing has changed.
    """
    for number, name in enumerate(upstream.names):
        tile_numel = runtime.optimizer.groups.begins(name).step
        stepped = early.get(name, ())
        for offset, begin in runtime.gradients.bypassed(name):
            if begin // tile_numel * tile_numel not in stepped:
                ranges = gradient_ranges(upstream, number)
                param = next(param for param, own, _ in ranges if own == offset)
                missing = f"the parameter {upstream.name_of(param)} got no gradient this time"
                raise GradientGoneError(f"cannot make this step: {reason or missing}")


def _difference(before: Sequence[Basis], now: Sequence[Basis]) -> str:
    """Describe the first value that differs; empty if none does."""
    for number, (old, new) in enumerate(zip(before, now, strict=True)):
        for name, value in old.items():
            if value != new[name]:
                return f"{name} of sub-group {number} went from {value} to {new[name]}"
    return ""
