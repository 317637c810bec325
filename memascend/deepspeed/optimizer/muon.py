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
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from deepspeed import comm as dist

from memascend.deepspeed.older_releases import norm_dtype
from memascend.deepspeed.optimizer.ahead import AfterBackward, NothingAhead
from memascend.deepspeed.optimizer.applying import Applying
from memascend.deepspeed.optimizer.fused_muon import update_of
from memascend.deepspeed.optimizer.upstream import Upstream
from memascend.plan.optimizers import FIRST_MOMENT, MOMENTUM
from memascend.runtime import Runtime
from memascend.streaming.optimizer.applied import Update
from memascend.streaming.optimizer.matrices import MatrixPart, MatrixStream, padded
from memascend.streaming.optimizer.step import Begins, Step
from memascend.streaming.optimizer.sub_group_step import step_by_update


class _Matrix(NamedTuple):
    number: int  # of its sub-group
    param: Any
    part: MatrixPart  # of this rank


#: A matrix, and the one behind it, which is read while this one is computed.
_Pair = tuple[_Matrix, _Matrix | None]


class MuonUpdates(NothingAhead):
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

    def stream_momentum(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the bytes of a sub-group's momentum, in the dtype of master weights."""
        return self._stream.stream(name, self._upstream.master_dtype)

    # -- before the norm -------------------------------------------------------------------------

    @torch.no_grad()
    def update_all(self) -> None:
        """Apply the update of each matrix, or replace its gradient by it, and move momentum on.

        A collective: with several ranks each gathers one matrix after the other, in one order.

        Raises:
            StoreError: The drive failed; some matrices are updated, others are not.
        """
        matrices = list(self._matrices())
        applied = self._agree(matrices)
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
                        update, momentum = self._update(matrix, following)
                        self._stream.write(matrix.part, update, momentum)
        finally:
            self._stream.drop()
        for name in dict.fromkeys(matrix.part.group for matrix in matrices):
            self._stream.finish(name)
        self._runtime.staging.wait_writes()
        if values is not None and applied:
            values.finish()
        self._note_applied(one for one in matrices if one.part.group in applied)

    def _matrices(self) -> Iterator[_Matrix]:
        """Yield the matrices of all sub-groups in order."""
        upstream = self._upstream
        for number, params in enumerate(upstream.params):
            for param in params if uses_muon(params) else ():
                _, offset, _ = upstream.position_of(param)
                group, numel = upstream.masters[number].ds_id, param.partition_numel()
                part = MatrixPart(group=group, offset=offset, numel=numel)
                yield _Matrix(number, param, part)

    def _agree(self, matrices: list[_Matrix]) -> dict[str, int]:
        """Return the sub-groups whose updates are applied, with their numbers, on every rank.

        Before, all ranks make the last updates again that serve as gradients once more.
        """
        numbers = {one.part.group: one.number for one in matrices}
        if not self._applying.is_wanted and not self._is_applied:
            return {}
        chosen = self._applying.choose(numbers)
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
        if not dist.is_initialized() or dist.get_world_size() == 1:
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
        update, momentum = self._update(matrix, following)
        self._stream.write_beside(matrix.part, momentum)
        if self._keeps(matrix.part):
            self._stream.set_update(matrix.part, update)
        return update

    def _keeps(self, part: MatrixPart) -> bool:
        return self._keeps_all or part in self._kept

    def _note_applied(self, matrices: Iterable[_Matrix]) -> None:
        for _, param, part in matrices:
            has_elements = self._upstream.part_begin(param, part.numel) < param.ds_numel
            if has_elements and not self._keeps(part):
                self._stream.note_applied(part)

    def _update(
        self, matrix: _Matrix, following: _Matrix | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's parts of a matrix's update and momentum, and note the norm."""
        number, param, part = matrix
        upstream, scale = self._upstream, self._upstream.loss_scale
        gradient, momentum = upstream.gather_matrix(param, *self._stream.read(part))
        if following is not None:
            self._stream.expect(following.part)
        if scale != 1.0:
            gradient.div_(scale)
        group = upstream.hyperparameters(number)
        self._options[part] = {
            "beta": group["momentum"],
            "ns_method": group.get("ns_method", "gram"),
            "is_expert_group": getattr(param, "is_expert_group", False),
            "num_heads": getattr(param, "muon_num_heads", None),
        }
        try:
            made = _call(gradient, momentum, self._options[part])
        except torch.OutOfMemoryError:  # the next matrix may have had the memory
            self._stream.give_up()
            raise
        self._stream.prefetch()  # while the device computes
        own_update, own_momentum = self._own(matrix, *made)
        if scale != 1.0:  # the step divides it by the scale, as a gradient
            own_update = own_update * scale
        upstream.note_norm(param, own_update.to(norm_dtype()).norm(2))
        return own_update, own_momentum

    def _own(self, matrix: _Matrix, *whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return this rank's part of each, with zeros behind the end of the matrix."""
        _, param, part = matrix
        begin = min(self._upstream.part_begin(param, part.numel), param.ds_numel)
        own_numel = min(part.numel, param.ds_numel - begin)
        return tuple(padded(one.view(-1).narrow(0, begin, own_numel), part.numel) for one in whole)

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
        if step.is_torn:
            for part in self._options:
                self._stream.note_lost(part)

    def take_results(self, step: Step) -> tuple[Begins, str]:
        """Return the tiles that have new weights beside the old ones."""
        values = self._applying.values
        return ({} if values is None else values.take()), ""

    def restart(self) -> None:
        """Drop new weights of a step that is over."""
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


def _narrower(accumulated: torch.dtype, communicated: torch.dtype) -> torch.dtype:
    """Return the dtype of accumulation if that of communication holds all of its values, else this.

    DeepSpeed keeps momentum in the dtype of communication, and updates it in that of accumulation.
    """
    is_held = torch.promote_types(accumulated, communicated) == communicated
    return accumulated if is_held else communicated
