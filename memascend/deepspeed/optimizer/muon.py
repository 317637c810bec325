"""DeepSpeed's Muon, matrix by matrix: before the norm each gradient is replaced by its update.

DeepSpeed's own function for offloaded optimizers brings whole sub-groups into host memory and all
of their matrices to the device. This one does the same for one matrix after the other, with
DeepSpeed's `muon_update` on the same device and in the same dtypes, so the bits are the same. While
a device with streams computes one, the next is read. The walk over tiles then makes the optimizer's
own step: weight decay and the update for matrices, CPU Adam for the other parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from memascend.deepspeed.older_releases import norm_dtype
from memascend.deepspeed.optimizer.upstream import Upstream
from memascend.plan.optimizers import FIRST_MOMENT, MOMENTUM
from memascend.runtime import Runtime
from memascend.streaming.optimizer.matrices import MatrixPart, MatrixStream, padded


class _Matrix(NamedTuple):
    number: int  # of its sub-group
    param: Any
    part: MatrixPart  # of this rank


class MuonUpdates:
    """The updates of one optimizer's matrices."""

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

    def stream_momentum(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the bytes of a sub-group's momentum, in the dtype of master weights."""
        return self._stream.stream(name, self._upstream.master_dtype)

    @torch.no_grad()
    def update_all(self) -> None:
        """Replace the gradient of each matrix by its update, and move its momentum on.

        A collective: with several ranks each gathers one matrix after the other, in one order.

        Raises:
            StoreError: The drive failed; some matrices are updated, others are not.
        """
        matrices = list(self._matrices())
        try:
            for matrix, following in zip_longest(matrices, matrices[1:]):
                self._update(matrix, following)
        finally:
            self._stream.drop()
        for group in dict.fromkeys(matrix.part.group for matrix in matrices):
            self._stream.finish(group)
        self._runtime.staging.wait_writes()

    def _matrices(self) -> Iterator[_Matrix]:
        """Yield the matrices of all sub-groups in order."""
        upstream = self._upstream
        for number, params in enumerate(upstream.params):
            for param in params if uses_muon(params) else ():
                _, offset, _ = upstream.position_of(param)
                group, numel = upstream.masters[number].ds_id, param.partition_numel()
                part = MatrixPart(group=group, offset=offset, numel=numel)
                yield _Matrix(number, param, part)

    def _update(self, matrix: _Matrix, following: _Matrix | None) -> None:
        # Imported late: the import compiles its kernels.
        from deepspeed.runtime.zero.muon.original_muon import muon_update

        number, param, part = matrix
        upstream, scale = self._upstream, self._upstream.loss_scale
        gradient, momentum = upstream.gather_matrix(param, *self._stream.read(part))
        if following is not None:
            self._stream.expect(following.part)
        if scale != 1.0:
            gradient.div_(scale)
        group = upstream.hyperparameters(number)
        try:
            update = muon_update(
                gradient,
                momentum,
                beta=group["momentum"],
                ns_method=group.get("ns_method", "gram"),
                is_expert_group=getattr(param, "is_expert_group", False),
                num_heads=getattr(param, "muon_num_heads", None),
            )
        except torch.OutOfMemoryError:  # the next matrix may have had the memory
            self._stream.give_up()
            raise
        self._stream.prefetch()  # while the device computes
        begin = min(upstream.part_begin(param, part.numel), param.ds_numel)
        own_numel = min(part.numel, param.ds_numel - begin)

        def own(whole: torch.Tensor) -> torch.Tensor:
            return padded(whole.view(-1).narrow(0, begin, own_numel), part.numel)

        own_update = own(update)
        if scale != 1.0:  # the step divides it by the scale, as a gradient
            own_update = own_update * scale
        upstream.note_norm(param, own_update.to(norm_dtype()).norm(2))
        self._stream.write(part, own_update, own(momentum))


def uses_muon(params: Any) -> bool:
    """Return whether Muon updates the parameters of a sub-group: all of them, or none."""
    return any(getattr(param, "use_muon", False) for param in params)


def _narrower(accumulated: torch.dtype, communicated: torch.dtype) -> torch.dtype:
    """Return the dtype of accumulation if that of communication holds all of its values, else this.

    DeepSpeed keeps momentum in the dtype of communication, and updates it in that of accumulation.
    """
    is_held = torch.promote_types(accumulated, communicated) == communicated
    return accumulated if is_held else communicated
