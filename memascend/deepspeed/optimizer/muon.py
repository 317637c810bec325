"""DeepSpeed's Muon, matrix by matrix: before the norm each gradient is replaced by its update.

DeepSpeed's own function for offloaded optimizers brings whole sub-groups into host memory and all
of their matrices to the device. This one does the same for one matrix after the other, with
DeepSpeed's `muon_update` on the same device and in the same dtypes, so the bits are the same. While
a device with streams computes one, the next is read.

With clipping updates are written, and the walk over tiles makes the optimizer's own step: weight
decay and the update for matrices, CPU Adam for the other parameters. Without, nothing waits for the
norm: weights take an update as it is made (applying.py), and the walk takes these values over, or
drops them if the norm is not finite. A gradient that does not arrive again is then an update that
is nowhere. So the last update of such a matrix is made again, and its updates are stored from then
on, too; all are once a script has read a gradient.

With one rank an update may be made during backward, of a gradient that is on the device, and take
its place: tiles are stepped by it as by gradients of Adam (ahead.py). Momentum of before is kept
until the step, which takes the new one over or, with the weights, leaves it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from deepspeed import comm as dist

from memascend.deepspeed.older_releases import norm_dtype
from memascend.deepspeed.optimizer.ahead import AfterBackward, WorkAhead, check_gradients
from memascend.deepspeed.optimizer.applying import Applying
from memascend.deepspeed.optimizer.fused_muon import update_of
from memascend.deepspeed.optimizer.upstream import Upstream
from memascend.errors import GradientGoneError, StoreError
from memascend.plan.optimizers import FIRST_MOMENT, MOMENTUM
from memascend.runtime import Runtime
from memascend.streaming.optimizer.applied import Update
from memascend.streaming.optimizer.matrices import MatrixPart, MatrixStream, padded
from memascend.streaming.optimizer.step import Begins, Step
from memascend.streaming.optimizer.sub_group_step import (
    EarlyStep,
    as_number,
    early_key,
    step_by_update,
)

log = logging.getLogger(__name__)


class _Matrix(NamedTuple):
    number: int  # of its sub-group
    param: Any
    part: MatrixPart  # of this rank


class _Made(NamedTuple):
    update: torch.Tensor  # both are of this rank, 1-D, with zeros behind the end of the matrix
    momentum: torch.Tensor
    norm: torch.Tensor  # of the update, 0-dim


#: A matrix, and the one behind it, which is read while this one is computed.
_Pair = tuple[_Matrix, _Matrix | None]


class MuonUpdates(WorkAhead):
    """The updates of one optimizer's matrices, some of which are applied ahead of the walk."""

    def __init__(
        self, upstream: Upstream, runtime: Runtime, communicated: torch.dtype | None
    ) -> None:
        """Wire to the runtime's streams, which are open, before there are sub-groups.

        Args:
            upstream: The optimizer.
            runtime: Owner of the streams.
            communicated: Dtype in which gradients would be reduced without memascend; None: in
                which they are.
        """
        self._upstream, self._runtime = upstream, runtime
        #: Dtype in which momentum is stored: that of codes if Adam's first moments are in codes.
        self.momentum_dtype = runtime.optimizer.tiles.shape.moments.get(FIRST_MOMENT) or _narrower(
            upstream.accumulation_dtype, communicated or upstream.reduction_dtype
        )
        runtime.optimizer.groups.apart = {MOMENTUM: self.momentum_dtype}
        self._stream = MatrixStream(
            groups=runtime.optimizer.groups,
            gradient_stream=runtime.gradients,
            slots=runtime.staging,
            state=MOMENTUM,
            dtype=upstream.accumulation_dtype,
            master_dtype=upstream.master_dtype,
            device=runtime.device,
            on_device=runtime.on_device,
        )
        self._applying = Applying(upstream, runtime)
        self._after_backward = AfterBackward(runtime.optimizer)
        self._is_applied = False  # the last update of some matrices, and it is not stored
        self._keeps_all = False  # stores all updates that are applied
        self._kept: set[MatrixPart] = set()  # matrices whose updates are stored
        self._options: dict[MatrixPart, Mapping[str, Any]] = {}  # of the last update
        self._lost: set[MatrixPart] = set()  # whose last updates cannot be made again
        # Matrices that were updated during backward, with their updates' norms; tiles likewise.
        self._early: dict[MatrixPart, tuple[_Matrix, torch.Tensor]] = {}
        self._early_begins: Begins = {}
        self._early_factor = 1.0  # of their gradients
        self._has_room = True  # on the device, beside backward
        self._is_cast = False  # whether the last step was made under autocast

    def stream_momentum(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the bytes of a sub-group's momentum, in the dtype of master weights."""
        return self._stream.stream(name, self._upstream.master_dtype)

    # -- before the norm -------------------------------------------------------------------------

    @torch.no_grad()
    def update_all(self) -> None:
        """Apply the update of each matrix, or replace its gradient by it, and move momentum on.

        A collective: with several ranks each gathers one matrix after the other, in one order.
        Matrices that were updated during backward are left out.

        Raises:
            StoreError: The drive failed; some matrices are updated, others are not.
        """
        matrices = [one for one in self._matrices() if one.part not in self._early]
        # Sub-groups whose new momentum lies beside the old one already, in part.
        beside = dict.fromkeys(part.group for part in self._early)
        # One step has second values of one kind: the walk would take the others for gradients.
        applied = self._agree(matrices, may_apply=not beside and not self._early_begins)
        values = self._applying.values
        if values is not None and applied:
            values.start(applied)
        pairs = itertools.zip_longest(matrices, matrices[1:])
        try:
            for name, some in itertools.groupby(pairs, lambda pair: pair[0].part.group):
                if name in applied:
                    self._apply(name, applied[name], some)
                else:
                    for matrix, following in some:
                        made = self._update(matrix, following)
                        if name in beside:
                            self._stream.write_beside(matrix.part, made.momentum)
                            self._stream.set_update(matrix.part, made.update)
                        else:
                            self._stream.write(matrix.part, made.update, made.momentum)
        finally:
            self._stream.drop()
        for name in dict.fromkeys(matrix.part.group for matrix in matrices):
            self._stream.finish(name)
        self._runtime.staging.wait_writes()
        if values is not None and applied:
            values.finish()
        if values is not None and beside:
            values.take_over_momentum(beside)
        for matrix, norm in self._early.values():
            self._upstream.note_norm(matrix.param, norm)
        self._note_applied(one for one in matrices if one.part.group in applied)

    def _matrices(self) -> Iterator[_Matrix]:
        """Yield the matrices of all sub-groups in order."""
        for params in self._upstream.params:
            yield from map(self._matrix_of, params if uses_muon(params) else ())

    def _matrix_of(self, param: Any) -> _Matrix:
        number, offset, _ = self._upstream.position_of(param)
        group, numel = self._upstream.masters[number].ds_id, param.partition_numel()
        return _Matrix(number, param, MatrixPart(group=group, offset=offset, numel=numel))

    def _agree(self, matrices: list[_Matrix], *, may_apply: bool) -> dict[str, int]:
        """Return the sub-groups whose updates are applied, with their numbers, on every rank.

        Before, all ranks make the last updates again that serve as gradients once more.
        """
        numbers = {one.part.group: one.number for one in matrices}
        if not self._applying.is_wanted and not self._is_applied:
            return {}
        chosen = self._applying.choose(numbers) if may_apply else set()
        refused = [name not in chosen for name in numbers]
        stale = [self._stream.is_replaced(one.part) for one in matrices]
        self._keeps_all, *flags = self._any_rank([self._keeps_all, *refused, *stale])
        for matrix, is_stale in zip(matrices, flags[len(numbers) :], strict=True):
            if is_stale:
                self._make_again(matrix)
        applied = {
            name: number
            for (name, number), is_refused in zip(numbers.items(), flags, strict=False)
            if not is_refused
        }
        self._applying.settle(is_refused=bool(chosen) and not applied)
        self._is_applied = bool(applied)
        return applied

    def _any_rank(self, flags: list[bool]) -> list[bool]:
        """Return whether each flag is set on any rank that shares the parameters; a collective."""
        if _rank_count() == 1:
            return flags
        found = torch.tensor(flags, dtype=torch.int32, device=self._runtime.device.name)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._upstream.process_group)
        return [bool(one) for one in found.tolist()]

    def _make_again(self, matrix: _Matrix) -> None:
        """Make the last update of a matrix again, and store it: it serves as a gradient."""
        _, param, part = matrix
        read = self._upstream.gather_matrix(param, *self._stream.read_again(part))
        update, _ = self._own(matrix, *_call(*read, self._options[part]))
        self._stream.set_update(part, update)
        self._kept.add(part)

    def _apply(self, name: str, number: int, pairs: Iterable[_Pair]) -> None:
        values = self._applying.values
        assert values is not None
        step = update_of(self._upstream.hyperparameters(number))
        assert step is not None
        members = self._upstream.members(number)
        values.apply(name, members, self._updates(pairs), partial(step_by_update, step, {}))

    def _updates(self, pairs: Iterable[_Pair]) -> Iterator[Update]:
        for matrix, following in pairs:
            yield matrix.part.offset, self._update_beside(matrix, following)

    def _update_beside(self, matrix: _Matrix, following: _Matrix | None) -> torch.Tensor:
        made = self._update(matrix, following)
        self._stream.write_beside(matrix.part, made.momentum)
        if self._keeps(matrix.part):
            self._stream.set_update(matrix.part, made.update)
        return made.update

    def _keeps(self, part: MatrixPart) -> bool:
        return self._keeps_all or part in self._kept

    def _note_applied(self, matrices: Iterable[_Matrix]) -> None:
        for _, param, part in matrices:
            self._lost.discard(part)
            has_elements = self._upstream.part_begin(param, part.numel) < param.ds_numel
            if has_elements and not self._keeps(part):
                self._stream.note_applied(part)

    def _update(self, matrix: _Matrix, following: _Matrix | None) -> _Made:
        """Update a matrix, whose values are on the drive, and note the norm."""
        upstream = self._upstream
        made = self._make_beside(matrix, following)
        if made is None:  # the first try's memory is free by now, and nothing was written
            made = self._make(matrix, *self._read(matrix), upstream.loss_scale)
        self._stream.prefetch()  # while the device computes
        upstream.note_norm(matrix.param, made.norm)
        return made

    def _make_beside(self, matrix: _Matrix, following: _Matrix | None) -> _Made | None:
        """Update a matrix beside memory for the next one; None: there was too little for both."""
        read = self._read(matrix)
        if following is not None:
            self._stream.expect(following.part)
        try:
            return self._make(matrix, *read, self._upstream.loss_scale)
        except torch.OutOfMemoryError:
            if not self._stream.is_expecting:
                raise
            self._stream.give_up()
            if _rank_count() > 1:  # they would have to gather it again together
                raise
            return None

    def _read(self, matrix: _Matrix) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (gradient, momentum), whole, as new tensors; a collective."""
        return self._upstream.gather_matrix(matrix.param, *self._stream.read(matrix.part))

    def _make(
        self, matrix: _Matrix, gradient: torch.Tensor, momentum: torch.Tensor, scale: float
    ) -> _Made:
        """Update a whole matrix, whose gradient has a loss scale; both tensors are overwritten."""
        number, param, part = matrix
        if scale != 1.0:
            gradient.div_(scale)
        group = self._upstream.hyperparameters(number)
        self._options[part] = {
            "beta": group["momentum"],
            "ns_method": group.get("ns_method", "gram"),
            "is_expert_group": getattr(param, "is_expert_group", False),
            "num_heads": getattr(param, "muon_num_heads", None),
        }
        update, own_momentum = self._own(matrix, *_call(gradient, momentum, self._options[part]))
        if scale != 1.0:  # the step divides it by the scale, as a gradient
            update = update * scale
        return _Made(update, own_momentum, update.to(norm_dtype()).norm(2))

    def _own(self, matrix: _Matrix, *whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return this rank's part of each, with zeros behind the end of the matrix."""
        _, param, part = matrix
        begin = min(self._upstream.part_begin(param, part.numel), param.ds_numel)
        own_numel = min(part.numel, param.ds_numel - begin)
        return tuple(padded(one.view(-1).narrow(0, begin, own_numel), part.numel) for one in whole)

    # -- during backward, with one rank ----------------------------------------------------------

    def may_be_early(self, number: int) -> bool:
        """Return whether a sub-group may be stepped during backward, as far as matrices tell."""
        if not uses_muon(self._upstream.params[number]):
            return True
        name = self._upstream.masters[number].ds_id
        is_possible = self._has_room and not self._is_cast
        return is_possible and self._applying.may_lie_beside(name, number)

    def reserve(self, steps: Iterable[EarlyStep]) -> None:
        """Reserve second values of those sub-groups of these steps that have matrices.

        Raises:
            StoreFullError: The drive has no room for them.
        """
        if self._take_failures():  # of a step that was left out
            self.note_failure()
        values, groups = self._applying.values, self._runtime.optimizer.groups
        for step in steps:
            if values is not None and groups.group(step.name).steps_updates:
                values.reserve(step.name, step.members)

    def note_failure(self) -> None:
        """Note that second values could not be written, and may be unreadable."""
        self._take_failures()
        if self._applying.values is not None:
            self._applying.values.note_failure()
        parts = (matrix.part for matrix in self._matrices())
        self._lost |= {part for part in parts if self._stream.is_replaced(part)}

    @torch.no_grad()
    def make_early(self, param: Any, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return the update that takes the place of a final gradient; None: none can be made.

        Momentum of after it lies beside the other. Called in the hook that brings the gradient, or
        without the lock by the thread that stores gradients.

        Args:
            param: A parameter that is a matrix.
            gradient: 1-D, whole, on its device; not changed.

        Raises:
            StoreError: Momentum could not be read.
        """
        matrix = self._matrix_of(param)
        if not self._has_room:
            return None
        try:
            own = (
                padded(gradient.clone(), matrix.part.numel),
                self._stream.read_momentum(matrix.part),
            )
            read = self._upstream.gather_matrix(param, *own)
            with torch.autocast(gradient.device.type, enabled=False):  # of a script's backward
                made = self._make(matrix, *read, self._upstream.loss_scale)
            if self._stream.is_replaced(matrix.part):  # the momentum of before goes
                self._lost.add(matrix.part)
            self._stream.write_beside(matrix.part, made.momentum)
        except torch.OutOfMemoryError:
            self.give_up_early()
            return None
        self._early[matrix.part] = matrix, made.norm
        return made.update.narrow(0, 0, gradient.numel())

    def give_up_early(self) -> None:
        """Make no update during backward any more: the device has no memory for it."""
        if self._has_room:
            log.warning(
                "memascend: the device has no memory for updates of Muon during backward. From now "
                "on they are made after it. fix: fewer tokens in a micro-batch"
            )
        self._has_room = False

    def _is_autocast(self) -> bool:
        """Return whether the caller computes updates in other dtypes than without autocast."""
        return torch.is_autocast_enabled(torch.device(self._runtime.device.name).type)

    def begin(self, step: Step, early: Begins, reason: str) -> None:
        """Take the results of backward, before any momentum moves on.

        Args:
            step: The step that begins.
            early: First elements of the tiles that were stepped during backward.
            reason: Why such tiles were discarded; empty if they were not.

        Raises:
            GradientGoneError: A gradient that is needed was used up. Nothing has changed.
            StoreError: A write of new momentum failed. Nothing has changed.
            TornStepError: The last step ended half-way.
        """
        self._is_cast = self._is_autocast()
        if self._early and self._is_cast:
            early, reason = {}, reason or "it is made under torch.autocast"
        if reason:
            self._early.clear()
        check_gradients(self._upstream, self._runtime, early, reason)
        for _, param, part in self._matrices():
            name = self._upstream.name_of(param)
            if part not in self._early and self._stream.sees_update(part):
                missing = f"the parameter {name} got no gradient this time"
                raise GradientGoneError(f"cannot make this step: {reason or missing}")
            if part in self._lost and self._stream.is_replaced(part):
                raise GradientGoneError(f"the last update of {name} is lost")
        self._check_momentum()
        self._early_begins, self._early_factor = early, step.factor
        step.note_updates()

    def _check_momentum(self) -> None:
        """Raise if new momentum could not be written, also if a caller caught the drive's error."""
        try:
            self._runtime.staging.wait_writes()
            if self._take_failures():
                raise StoreError(
                    "new momentum of Muon could not be written during backward, and no weight has "
                    "changed. cause: an earlier error of the drive. fix: see that error, then go "
                    "on with the next backward pass"
                )
        except BaseException:
            self.note_failure()
            raise

    def _take_failures(self) -> bool:
        """Return whether a write of second momentum failed since the last call."""
        groups = self._runtime.optimizer.groups
        names = dict.fromkeys(matrix.part.group for matrix in self._matrices())
        keys = [early_key(groups.group(name).key(MOMENTUM)) for name in names]
        return any([self._runtime.staging.take_failure(key) for key in keys])

    # -- ahead of the walk -----------------------------------------------------------------------

    def note_final(self, step: Step, name: str, offset: int) -> None:
        """Read the first tiles of the walk, unless updates come before."""
        if not self._applying.is_wanted or self._applying.values is None:
            self._after_backward.note_final(step, name, offset)

    def note_look(self) -> None:
        """Note that the script reads a gradient: it is to be found after steps, too."""
        self._keeps_all = True

    def drop(self, step: Step, reason: str) -> None:
        """Drop tiles that were read; after a torn step no update can be made again."""
        self._after_backward.drop(step, reason)
        if step.is_mixed:
            for part in self._options:
                self._stream.note_lost(part)

    def take_results(self, step: Step) -> tuple[Begins, str]:
        """Return the tiles that have new weights beside the old ones."""
        values = self._applying.values
        if self._early_begins and as_number(step.factor) != self._early_factor:
            raise AssertionError(
                f"tiles were stepped during backward with the factor {self._early_factor}, and the "
                f"step has {step.factor}. cause: a mistake of memascend. fix: please report it"
            )
        return self._early_begins or ({} if values is None else values.take()), ""

    def restart(self) -> None:
        """Drop new values of a step that is over."""
        self._early.clear()
        self._early_begins = {}
        if self._applying.values is not None:
            self._applying.values.drop()

    def discard(self) -> None:
        """Free the drive space of weights and momentum beside the current ones."""
        self._applying.discard()


def _call(
    gradient: torch.Tensor, momentum: torch.Tensor, options: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return update and new momentum of a whole matrix; both arguments are overwritten."""
    # Imported late: the import compiles its kernels.
    from deepspeed.runtime.zero.muon.original_muon import muon_update

    return muon_update(gradient, momentum, **options), momentum


def uses_muon(params: Any) -> bool:
    """Return whether Muon updates the parameters of a sub-group: all of them, or none."""
    return any(getattr(param, "use_muon", False) for param in params)


def _rank_count() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _narrower(accumulated: torch.dtype, communicated: torch.dtype) -> torch.dtype:
    """Return the dtype of accumulation if that of communication holds all of its values, else this.

    DeepSpeed keeps momentum in the dtype of communication, and updates it in that of accumulation.
    """
    is_held = torch.promote_types(accumulated, communicated) == communicated
    return accumulated if is_held else communicated
