"""Several equal drives in memory, with the sizes that the plan has for so many: how fast together?

Each drive is the memory engine's: it runs so many requests at a time, for so long each, so that its
rate is stated, and it has that rate only with so many in flight. Each of the three paths of a
training step moves its bytes through the parts of the product, with the sizes of the plan:
parameters are read, gradients are written, the optimizer's walk reads and writes.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import harness
import torch

from memascend.base.sizes import BOUNCE_BYTES
from memascend.base.units import GIB, MIB
from memascend.kernels import adam
from memascend.memory.allocator import HostAllocator
from memascend.memory.pool import Pool
from memascend.nvme.store import MemoryFaults, TensorStore
from memascend.plan.derive import Plan, derive
from memascend.plan.request import PlanRequest
from memascend.plan.shapes import builtin
from memascend.streaming.gradients.stream import GradientStream
from memascend.streaming.optimizer.step import Step
from memascend.streaming.optimizer.stream import OptimizerStream
from memascend.streaming.optimizer.sub_group import Member
from memascend.streaming.optimizer.sub_group_step import SubGroupStep
from memascend.streaming.optimizer.sub_groups import SubGroups
from memascend.streaming.optimizer.tile_memory import TileMemory, TileShape
from memascend.streaming.parameters.shard import Shard
from memascend.streaming.parameters.stream import ParameterStream
from memascend.transfer.staging import StagingSlots

MODEL = "Llama-3.1-8B"
CHUNK_BYTES = 2 * MIB
BF16_BYTES, FP32_BYTES = 2, 4
#: Elements of a shard: a square matrix of the model, and its gradient.
SHARD_NUMEL = 4096 * 4096
SUB_GROUP = "0_0"
#: Passes over all shards in one measurement, so that begin and end count little.
PASSES = 8
MOMENTS = ("exp_avg", "exp_avg_sq")
#: Bytes of an element that a step of Adam reads, and writes.
STEP_BYTES = 2 * (3 * FP32_BYTES + BF16_BYTES)
COEFFICIENTS = adam.AdamCoefficients(
    factor=1.0,
    beta1=0.9,
    beta2=0.999,
    take1=0.1,
    take2=0.001,
    root_scale=1.0,
    epsilon=1e-8,
    step_size=1e-3,
)


def plan_for(drives: int) -> Plan:
    """The plan of the model for so many drives."""
    return derive(builtin(MODEL), request=PlanRequest(drive_count=drives))


class Paths:
    """The three paths over a store on drives in memory, with the sizes of a plan."""

    def __init__(self, plan: Plan, *, drives: int, shards: int) -> None:
        """Write what is moved later, at full speed.

        Args:
            plan: Sizes of tiles, staging slots and reading ahead.
            drives: Drives of the store.
            shards: Number of shards of SHARD_NUMEL elements; all are one sub-group.
        """
        self.faults = MemoryFaults(capacity_bytes=4 * GIB)
        self._arena = HostAllocator()
        self.store = TensorStore(
            volumes=[f"drive {index}" for index in range(drives)],
            bounce=self._arena.tensor(BOUNCE_BYTES, torch.uint8, component="bench"),
            engine="memory",
            chunk_bytes=CHUNK_BYTES,
            faults=self.faults,
        )
        self.staging = StagingSlots(
            store=self.store,
            memory=self._arena,
            slot_bytes=plan.staging_slot_bytes,
            slot_count=plan.staging_slot_count,
        )
        self._gradient = torch.ones(SHARD_NUMEL, dtype=torch.bfloat16)
        self.parameters, self.shards = self._make_parameters(plan, shards)
        self._members = [
            Member(index * SHARD_NUMEL, SHARD_NUMEL, torch.bfloat16, key=shard.key)
            for index, shard in enumerate(self.shards)
        ]
        self.gradients = GradientStream(store=self.store, slots=self.staging)
        self.tiles, self.optimizer = self._make_optimizer(plan)
        self._step = Step()
        self._parameter = torch.nn.Parameter(torch.empty(0))
        self._states: dict[torch.Tensor, dict[str, Any]] = {self._parameter: {}}
        self.store_gradients()

    def _make_parameters(self, plan: Plan, count: int) -> tuple[ParameterStream, list[Shard]]:
        pool = Pool(memory=self._arena, component="bench", budget_bytes=0)
        pool.resize(plan.parameter_slots_bytes, slot_bytes_max=plan.slot_bytes_max)
        stream = ParameterStream(
            store=self.store, pool=pool, staging=self.staging, drive_count=plan.drive_count
        )
        shards = [
            stream.shard(f"param.{index}", SHARD_NUMEL, torch.bfloat16) for index in range(count)
        ]
        for shard in shards:
            self.store.write(key=shard.key, source=self._gradient).wait()
        return stream, shards

    def _make_optimizer(self, plan: Plan) -> tuple[TileMemory, OptimizerStream]:
        shape = TileShape(
            numel=plan.tile_numel,
            count=plan.tile_count,
            state_count=len(MOMENTS),
            master_dtype=torch.float32,
            state_dtype=torch.float32,
            gradient_dtype=torch.bfloat16,
            parameter_dtype=torch.bfloat16,
        )
        tiles = TileMemory(store=self.store, memory=self._arena, shape=shape)
        groups = SubGroups(store=self.store, slots=self.staging, tiles=tiles)
        groups.create(SUB_GROUP, len(self.shards) * SHARD_NUMEL, self._members)
        for name in MOMENTS:
            groups.add_state(SUB_GROUP, name, torch.float32, fill=0.0)
        groups.settle()
        stream = OptimizerStream(groups=groups, tiles=tiles, gradient_stream=self.gradients)
        return tiles, stream

    def slow_down(self, milliseconds: int, width: int) -> None:
        """From now on run `width` requests at a time on each drive, for so long each."""
        self.faults.slow_milliseconds, self.faults.slow_width = milliseconds, width
        self.faults.slow_volume = MemoryFaults.EVERY_VOLUME

    def read_parameters(self) -> None:
        """Read every shard in each of PASSES passes, in order, as forward does."""
        coming = self.shards * PASSES
        for index, shard in enumerate(coming):
            self.parameters.prefetch(coming[index : index + len(self.shards)])
            self.parameters.read_now([shard])
            self.parameters.drop(shard)

    def store_gradients(self) -> None:
        """Write the gradient of every shard in each of PASSES passes, as backward does."""
        for member in self._members * PASSES:
            self.gradients.put(SUB_GROUP, member.offset, self._gradient)
        self.gradients.submit()
        self.staging.wait_writes()

    def step(self) -> None:
        """Step every tile with the fused Adam."""
        self._step = self._step.following()
        self._step.decide([SUB_GROUP])
        self.optimizer.start(self._step)
        step = SubGroupStep(
            name=SUB_GROUP,
            parameter=self._parameter,
            states=self._states,
            update=_never,
            factor=1.0,
            members=self._members,
            fused=_adam,
        )
        self.optimizer.step(step)
        self.optimizer.drain()

    def close(self) -> None:
        """Give the memory of the drives back."""
        self.faults.slow_volume = -1
        self.store.close()


def _never() -> None:
    raise AssertionError("the fused Adam steps")


def _adam(
    *,
    begin: int,
    gradient: torch.Tensor,
    factor: float,
    weight: torch.Tensor,
    values: dict[str, Any],
    scales: None,
    output: torch.Tensor | None,
) -> None:
    moments = {name: values[name] for name in MOMENTS}
    adam.update(
        gradient=gradient, weight=weight, output=output, coefficients=COEFFICIENTS, **moments
    )


#: The paths by name, each with the bytes that it moves for an element.
RUNS: dict[str, tuple[Callable[[Paths], None], int]] = {
    "parameters are read": (Paths.read_parameters, PASSES * BF16_BYTES),
    "gradients are written": (Paths.store_gradients, PASSES * BF16_BYTES),
    "the optimizer's walk": (Paths.step, STEP_BYTES),
}


def run(options: argparse.Namespace) -> Iterator[harness.Row]:
    """Measure every path with one drive and with several; yield a row for each."""
    drives, milliseconds, width = options.equal, options.milliseconds, options.width
    one, several = "one drive", f"{drives} drives"
    sizes_of_one = f"{several}, sizes of one"
    plans = {one: (plan_for(1), 1), sizes_of_one: (plan_for(1), drives)}
    plans[several] = plan_for(drives), drives
    config = {
        "milliseconds": milliseconds,
        "width": width,
        "chunk_bytes": CHUNK_BYTES,
        "shards": options.shards,
    }
    samples: dict[str, dict[str, list[harness.Sample]]] = {name: {} for name in RUNS}
    for contender, (plan, count) in plans.items():
        with ExitStack() as stack:
            paths = Paths(plan, drives=count, shards=options.shards)
            stack.callback(paths.close)
            paths.slow_down(milliseconds, width)
            for name, (move, _) in RUNS.items():
                taken = [
                    harness.measure(functools.partial(move, paths)) for _ in range(options.rounds)
                ]
                samples[name][contender] = taken
    for name, (_, element_bytes) in RUNS.items():
        nbytes = options.shards * SHARD_NUMEL * element_bytes
        for contender, taken in samples[name].items():
            figures = {
                "MB/s": harness.spread([nbytes / sample.wall_s / 1e6 for sample in taken]),
                "times one drive": harness.speedup(taken, samples[name][one]),
                "CPUs busy": harness.spread([sample.cpu_s / sample.wall_s for sample in taken]),
                "host MiB": plans[contender][0].host_bytes / MIB,
            }
            yield harness.Row("volumes", name, contender, figures, config, harness.machine())


def run_and_report(options: argparse.Namespace) -> None:
    rows = list(run(options))
    rate_mb_s = options.width * CHUNK_BYTES / options.milliseconds / 1e3
    title = (
        f"{options.equal} equal drives of {rate_mb_s:.0f} MB/s each: {options.width} request(s) of "
        f"{CHUNK_BYTES // MIB} MiB at a time, {options.milliseconds} ms for each"
    )
    harness.report("volumes-equal", title, rows, options.out)
