"""Trains a stack of layers and prints which reads each rank waited for, module by module, as JSON.

Started by test_gathers.py. The clock is the program's own, one for each rank: a read takes as long
as it has bytes, one behind the other, and a layer computes on a device that works behind the host.
So what is counted is the same on every machine. In the last step reads take no time, and a gather
as long as a layer computes: its copy and its collective run beside the device, one after the other.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

import memascend  # noqa: F401  what the torch.backends entry point does in an installed copy
from memascend.base.device_memory import RELEASED_COUNT_MIN
from tests.support.process_group import leave

WORLD = int(os.environ["WORLD_SIZE"])
#: A shard of more than a MiB: a smaller one would stay in host memory.
LAYERS, WIDTH = 12, 768 * WORLD
SHARD_BYTES = WIDTH * WIDTH * 2 // WORLD
#: The first step makes the states, and DeepSpeed learns the order of the modules.
WARMUPS = 3


class Clock:
    """When the host, the drive and the device are done with what they were given, in bytes."""

    def __init__(self) -> None:
        self.host = self.drive = self.link = self.device = 0
        self.reads_take = self.gathers_take = 0  # for each byte
        self.gathered: dict[str, int] = {}  # when a parameter is whole on the device
        self.computed: list[int] = []  # when the device is done with each layer
        self.needed: frozenset[str] = frozenset()  # by the module that is about to compute
        self.counts: Counter[str] = Counter()

    def start(self) -> None:
        """Begin a phase with nothing under way."""
        now = max(self.host, self.drive, self.link, self.device)
        self.host = self.drive = self.link = self.device = now
        self.counts.clear()
        self.begun = self.host

    def read(self, nbytes: int) -> int:
        """Have the drive read; return when it will be done."""
        self.counts["read"] += nbytes
        self.drive = max(self.drive, self.host) + nbytes * self.reads_take
        return self.drive

    def wait(self, key: str, end: int) -> None:
        """Have the host wait for a read."""
        if end > self.host:
            self.counts["needed" if key in self.needed else "ahead"] += 1
            self.host = end

    def gather(self, key: str, nbytes: int) -> None:
        """Have a gather begin behind those before it."""
        self.counts["gathers"] += 1
        self.link = max(self.link, self.host) + nbytes * self.gathers_take
        self.gathered[key] = self.link

    def compute(self, key: str, nbytes: int) -> None:
        """Have the device compute with a parameter behind what it has to do already."""
        self.counts["compute"] += nbytes
        self.device = max(self.device, self.host, self.gathered[key]) + nbytes
        self.computed.append(self.device)

    def wait_for_released(self) -> None:
        """Have the host wait until few of the layers that it let go are still to be computed."""
        if len(self.computed) > RELEASED_COUNT_MIN:
            self.host = max(self.host, self.computed[-1 - RELEASED_COUNT_MIN])

    @property
    def passed(self) -> int:
        """Since the phase began, until host and device are done."""
        return max(self.host, self.device) - self.begun


class TimedTicket:
    """A read that is over when the clock says so."""

    def __init__(self, clock: Clock, ticket: Any, key: str, nbytes: int) -> None:
        self._clock, self._ticket, self._key = clock, ticket, key
        self._end = clock.read(nbytes)

    def done(self) -> bool:
        """Whether it is over on the clock."""
        return self._end <= self._clock.host

    def wait(self) -> None:
        """Until both it and the real one are over."""
        self._clock.wait(self._key, self._end)
        self._ticket.wait()


class TimedStore:
    """The store, whose reads take time on the clock."""

    def __init__(self, store: Any, clock: Clock) -> None:
        self._store, self._clock = store, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read(self, *, key: str, target: torch.Tensor, **options: Any) -> TimedTicket:
        """Begin a read."""
        ticket = self._store.read(key=key, target=target, **options)
        return TimedTicket(self._clock, ticket, key, target.nbytes)


class Layer(torch.nn.Module):
    """One matrix; computes as long as it takes to read the rank's part of it."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = ""  # of the shard of its matrix, which forward may not touch
        self._clock = clock

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of the same shape."""
        result = rows + torch.tanh(self.linear(rows))
        self._clock.compute(self.key, SHARD_BYTES)  # DeepSpeed has let it: the matrix is there
        return result


class Stack(torch.nn.Module):
    """Layers one after the other."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(clock) for _ in range(LAYERS))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        for layer in self.layers:
            rows = layer(rows)
        return rows.float().square().mean()


def config(drive: str) -> dict[str, Any]:
    on_drive = {"device": "nvme", "nvme_path": drive}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": on_drive,
            "offload_optimizer": on_drive,
            # Three layers are gathered ahead, and as many are read ahead of those.
            "stage3_prefetch_bucket_size": 3 * WIDTH * WIDTH,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
        },
        "steps_per_print": 1_000_000,
        "memascend": {
            "buffer_pool": {"prefetch_bytes": 3 * SHARD_BYTES},
            "streaming": {"optimizer": {"overlap": False}},
        },
    }


def note_what_is_needed(clock: Clock, swapper: Any) -> None:
    """Have the clock know which module is about to compute."""
    original = PartitionedParameterCoordinator.fetch_sub_module

    def fetch(coordinator: Any, module: Any, forward: bool) -> None:
        clock.needed = frozenset(swapper.key(param) for param in module.parameters(recurse=False))
        original(coordinator, module, forward)

    PartitionedParameterCoordinator.fetch_sub_module = fetch


def note_gathers(clock: Clock, swapper: Any) -> None:
    """Have the clock know when a gather begins, behind the least that it waits for."""
    original, swapper.wait_for_released = swapper.after_gather, clock.wait_for_released

    def after_gather(params: Any) -> None:
        for param in params:
            clock.gather(swapper.key(param), SHARD_BYTES)
        original(params)

    swapper.after_gather = after_gather


def train(engine: Any, clock: Clock) -> dict[str, Any]:
    """Train a step; return what the clock has counted in forward, and in the whole step."""
    rows = torch.randn(2, WIDTH).to(torch.bfloat16)
    clock.start()
    loss = engine(rows)
    forward = {"passed": clock.passed, **clock.counts}
    engine.backward(loss)
    whole = {"passed": clock.passed, **clock.counts}
    engine.step()
    return {"forward": forward, "whole": whole, "shard": SHARD_BYTES}


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    clock = Clock()
    with tempfile.TemporaryDirectory(dir=".") as drive:
        settings = config(drive)
        with deepspeed.zero.Init(config_dict_or_path=settings, dtype=torch.bfloat16):
            model = Stack(clock)
        engine = deepspeed.initialize(model=model, config=settings)[0]
        swapper = model.layers[0].linear.weight.nvme_swapper
        for layer in model.layers:
            layer.key = swapper.key(layer.linear.weight)
        note_what_is_needed(clock, swapper)
        note_gathers(clock, swapper)
        swapper._stream._store = TimedStore(swapper._stream._store, clock)
        clock.reads_take = 1
        for _ in range(WARMUPS):
            train(engine, clock)
        rank = {"reads": train(engine, clock)}
        clock.reads_take, clock.gathers_take = 0, 1
        rank["gathers"] = train(engine, clock)
        engine.destroy()
    found: list[Any] = [None] * WORLD
    torch.distributed.all_gather_object(found, rank)
    if torch.distributed.get_rank() == 0:
        print(json.dumps(found))
    leave()


if __name__ == "__main__":
    main()
