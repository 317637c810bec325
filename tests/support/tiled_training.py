"""Sub-groups in a stream, with members on the drive and in memory, and one optimizer."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from memascend.errors import StoreError
from memascend.nvme.store import TensorStore
from memascend.streaming.gradients.stream import GradientStream
from memascend.streaming.optimizer.low_bits import LowBits
from memascend.streaming.optimizer.step import Step
from memascend.streaming.optimizer.stream import OptimizerStream
from memascend.streaming.optimizer.sub_group import Member
from memascend.streaming.optimizer.sub_group_step import FusedUpdate, SubGroupStep
from memascend.streaming.optimizer.sub_groups import SubGroups
from memascend.streaming.optimizer.tile_memory import TileMemory, TileShape
from tests.support.streaming_fakes import LateDevice, RemoteTensor
from tests.support.streaming_hosts import HostTensors, memory_store, staging_slots

SIZES = {"0_3": 20_011, "4_4": 8192, "5_9": 3}


def tile_shape(**changes: Any) -> TileShape:
    """One tile of Adam's, in mixed precision."""
    shape = TileShape(
        numel=4096,
        count=1,
        state_count=2,
        master_dtype=torch.float32,
        state_dtype=torch.float32,
        gradient_dtype=torch.bfloat16,
        parameter_dtype=torch.bfloat16,
    )
    return dataclasses.replace(shape, **changes)


class Training:
    """Memory, store and streams, and a step over all sub-groups."""

    def __init__(
        self,
        make: Callable[[Any], torch.optim.Optimizer],
        *,
        store: TensorStore | None = None,
        tile_numel: int = 4096,
        tile_count: int = 3,
        gradient_dtype: torch.dtype = torch.bfloat16,
        state_count: int = 2,
        device: LateDevice | None = None,
        state_dtype: torch.dtype = torch.float32,
        spare_count: int = 0,
        split: bool = False,
        low_bits: LowBits = LowBits.FLAGGED,
        moments: Mapping[str, torch.dtype] | None = None,
        apart: Mapping[str, torch.dtype] | None = None,
        slots: Mapping[str, int] | None = None,
    ) -> None:
        self.device = device
        self.store = store or memory_store()
        self.slots = staging_slots(self.store, **slots or {})
        self.gradient_stream = GradientStream(store=self.store, slots=self.slots)
        self.memory = HostTensors()
        shape = tile_shape(
            numel=tile_numel,
            count=tile_count,
            state_count=state_count,
            state_dtype=state_dtype,
            gradient_dtype=gradient_dtype,
            spare_count=spare_count,
            moments=moments or {},
        )
        tiles = TileMemory(
            store=self.store,
            memory=self.memory,
            shape=shape,
            new_event=None if device is None else device.new_event,
        )
        self.tiles = tiles
        self.groups = SubGroups(store=self.store, slots=self.slots, tiles=tiles)
        self.groups.apart = apart or {}
        self.current = Step()
        self.stream = OptimizerStream(
            groups=self.groups, tiles=tiles, gradient_stream=self.gradient_stream
        )
        self.initial = {
            name: torch.randn(numel, generator=torch.Generator().manual_seed(numel))
            for name, numel in SIZES.items()
        }
        self.members = {}
        for name, numel in SIZES.items():
            self.members[name] = self._members(name, numel, all_on_drive=split)
            weights = self.initial[name]
            if split:
                self.initial[name] = weights.bfloat16().float()
                self._write_members(name)
                flag_state = "exp_avg_sq" if low_bits.has_flags else ""
                self.groups.create_split(
                    name, numel, self.members[name], low_bits=low_bits, flag_state=flag_state
                )
            else:
                self.groups.create(name, numel, [Member(0, numel, weights.dtype, tensor=weights)])
        self.parameters = {name: torch.nn.Parameter(torch.empty(0)) for name in SIZES}
        self.optimizer = make(list(self.parameters.values()))
        self.group, *_ = self.optimizer.param_groups
        self.group["params"] = []

    def _write_members(self, name: str) -> None:
        for member in self.members[name]:
            assert member.key is not None
            value = self.initial[name].narrow(0, member.offset, member.numel).bfloat16()
            self.store.write(key=member.key, source=value).wait()

    def _members(self, name: str, numel: int, *, all_on_drive: bool) -> list[Member]:
        """Odd thirds: two on the drive, the last in memory, of the device if there is one."""
        cuts = [0, numel // 3, numel // 3 * 2, numel]
        members = []
        for index, (begin, end) in enumerate(itertools.pairwise(cuts)):
            count = end - begin
            if (index < 2 or all_on_drive) and count:
                key = f"param.{name}.{index}"
                self.store.reserve(key=key, nbytes=count * 2)
                members.append(Member(begin, count, torch.bfloat16, key=key))
            elif count:
                tensor = torch.empty(count, dtype=torch.bfloat16)
                if self.device is not None:
                    tensor = self.device.tensor(tensor, RemoteTensor)
                members.append(Member(begin, count, torch.bfloat16, tensor=tensor))
        return members

    def step(
        self,
        gradients: dict[str, torch.Tensor],
        factor: float | torch.Tensor,
        fused: FusedUpdate | None = None,
        early: Mapping[str, frozenset[int]] | None = None,
    ) -> None:
        for name, gradient in gradients.items():
            self.gradient_stream.put(name, 0, gradient)
        self.current = self.current.following()
        self.current.decide(list(SIZES), early)
        self.stream.start(self.current)
        for name in SIZES:
            parameter = self.parameters[name]

            def update(parameter: torch.Tensor = parameter) -> None:
                self.group["params"] = [parameter]
                self.optimizer.step()
                self.group["params"] = []

            step = SubGroupStep(
                name=name,
                parameter=parameter,
                states=self.optimizer.state,
                update=update,
                factor=factor,
                members=self.members[name],
                fused=fused,
            )
            self.stream.step(step)
        self.stream.drain()

    def load(self, name: str, state: str | None, value: torch.Tensor) -> None:
        """Load the master weights, or a state, as from a file; `drain` waits."""

        def source(offset: int, target: torch.Tensor) -> None:
            target.copy_(value.view(torch.uint8)[offset:][: target.numel()])

        if state is None:
            self.stream.load_weights(name, self.members[name], source)
        else:
            self.groups.load(name, state=state, dtype=value.dtype, source=source)

    def master(self, name: str, state: str | None = None) -> torch.Tensor:
        value = torch.empty(SIZES[name])
        self.groups.get(name, 0, value, state=state)
        return value

    def parameter(self, name: str) -> torch.Tensor:
        parts = []
        for member in self.members[name]:
            part = member.tensor
            if member.key is not None:
                part = torch.empty(member.numel, dtype=member.dtype)
                self.store.read(key=member.key, target=part).wait()
            assert part is not None
            parts.append(part.as_subclass(torch.Tensor))
        return torch.cat(parts)


def gradients(step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(n, generator=generator).to(dtype) for name, n in SIZES.items()}


def lose_drive_at(call: int, stream: OptimizerStream, patch: pytest.MonkeyPatch) -> None:
    """Have the drive fail when this tile, counted from 1, is to be stored; not those after it."""
    write_back, calls = stream._write_back, itertools.count(1)

    def fail(*arguments: Any, **keywords: Any) -> None:
        if next(calls) == call:
            raise StoreError(5, "the drive is gone")
        write_back(*arguments, **keywords)

    patch.setattr(stream, "_write_back", fail)


def moved_gradients(training: Training, patch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the key of each read and write of a gradient from now on."""
    keys: list[str] = []
    store = training.store

    def move(call: Callable[..., Any], *, key: str, **keywords: Any) -> Any:
        if key.startswith("gradient."):
            keys.append(key)
        return call(key=key, **keywords)

    for name in ("read", "write"):
        patch.setattr(store, name, functools.partial(move, getattr(store, name)))
    return keys
