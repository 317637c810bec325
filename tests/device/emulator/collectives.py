"""Collectives for "sim" with NCCL's rules: on a stream of their own, and `wait` keeps no host.

One rank copies, several exchange over gloo.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.device.emulator import torch_device

NAME = "simccl"
Tensors = Sequence[torch.Tensor]


class Work(dist._Work):
    def __init__(self, event: Any, tensors: Sequence[Tensors]) -> None:
        super().__init__()
        self.event, self.tensors = event, tensors  # kept until waited for, as NCCL does

    def wait(self, timeout: Any = None) -> bool:
        torch_device.current_stream().wait_event(self.event)
        self.tensors = ()
        return True

    def is_completed(self) -> bool:
        return self.event.query()

    def synchronize(self) -> None:
        self.wait()


class SimGroup(dist.ProcessGroup):
    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout) if size > 1 else None
        self._stream: Any = None
        self._name = ""

    def getBackendName(self) -> str:
        return NAME

    pg_name = group_name = property(lambda self: self._name)

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, text: str) -> None:
        self._description = text

    def _run(self, kind: str, outs: Tensors, ins: Tensors, root: int = 0, opts: Any = None) -> Work:
        if self._stream is None:
            self._stream = torch_device.Stream()
        self._stream.wait_stream(torch_device.current_stream())
        operation = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        number = int(getattr(operation, "op", operation))
        with torch_device.stream(self._stream):
            torch_device.core.collective(kind, self._gloo, list(outs), list(ins), root, number)
            event = torch_device.Event()
            event.record()
        return Work(event, (outs, ins))

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        return self._run("allreduce", tensors, [], opts=opts)

    allreduce_coalesced = reduce = allreduce

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Work:
        return self._run("broadcast", tensors, [], root=getattr(opts, "rootRank", 0))

    def allgather(self, outs: Sequence[Tensors], ins: Tensors, opts: Any = None) -> Work:
        return self._run("allgather", outs[0], ins)

    def all_gather_single(self, out: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work:
        return self._run("allgather", [out], [given])

    def all_gather_single_coalesced(self, outs: Tensors, ins: Tensors, opts: Any = None) -> Work:
        pairs = zip(outs, ins, strict=True)
        return [self.all_gather_single(out, given, opts) for out, given in pairs][-1]

    def reduce_scatter(self, outs: Tensors, ins: Sequence[Tensors], opts: Any = None) -> Work:
        return self._run("reduce_scatter", outs, ins[0], opts=opts)

    def reduce_scatter_single(
        self, out: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> Work:
        return self._run("reduce_scatter", [out], [given], opts=opts)

    def reduce_scatter_single_coalesced(
        self, outs: Tensors, ins: Tensors, opts: Any = None
    ) -> Work:
        pairs = zip(outs, ins, strict=True)
        return [self.reduce_scatter_single(out, given, opts) for out, given in pairs][-1]

    # The names before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def barrier(self, opts: Any = None) -> Work:
        work = self._run("barrier", [], [])
        work.event.synchronize()
        return work


def register() -> None:
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, SimGroup, devices=["sim", "cpu"])
