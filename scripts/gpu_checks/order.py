"""Copies that are overtaken: the slots, staging slots and tiles of training, behind a slow device.

Each check has the device do something long first, so that every copy waits in line while the host
goes on. What keeps the host from using memory too early is an event; the control leaves it out, and
then the data must be damaged, or the check could not fail.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from memascend.base import waiting
from memascend.base.sizes import BOUNCE_BYTES
from memascend.base.units import MIB
from memascend.memory.allocator import HostAllocator
from memascend.memory.pool import Pool
from memascend.nvme.store import TensorStore
from memascend.streaming.optimizer.tile_memory import TileMemory, TileShape
from memascend.streaming.parameters.stream import ParameterStream
from memascend.transfer.staging import StagingSlots

from . import Check, Figures

SLOT_BYTES = 16 * MIB  # a copy of it takes long enough to be overtaken
SLOT_COUNT = 2
CHUNKS = 6  # of one tensor: more than there are slots
SLOW_CYCLES = 2_000_000_000  # about a second on today's devices
DTYPE = torch.float32
NUMEL = SLOT_BYTES // DTYPE.itemsize


class Device:
    """CUDA; tests put something in its place that is not asynchronous."""

    name = "cuda"
    registers = True

    def event(self) -> Any:
        """An event that is recorded."""
        event = self.new_event()
        event.record()
        return event

    def new_event(self) -> Any:
        """An event as the runtime makes them."""
        return waiting.new_event(torch.cuda.Event)

    def start(self) -> None:
        """Brings the device into use, without which it registers nothing."""
        torch.zeros(1, device="cuda")

    @contextmanager
    def behind_something_long(self) -> Iterator[None]:
        """A stream whose first work takes a second; on return all of it is done."""
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLOW_CYCLES)
            yield
        stream.synchronize()


DEVICE = Device()


@contextmanager
def _parts(folder: Path, *, broken: bool = False) -> Iterator[SimpleNamespace]:
    """What a runtime is made of, at a small size; broken, staging slots know no events."""
    DEVICE.start()
    memory = HostAllocator(register_device=DEVICE.registers)
    bounce = memory.tensor(BOUNCE_BYTES, torch.uint8, component="bounce buffers")
    with TensorStore(volumes=[folder], bounce=bounce) as store:
        staging = StagingSlots(
            store=store,
            memory=memory,
            slot_bytes=SLOT_BYTES,
            slot_count=SLOT_COUNT,
            new_event=None if broken else DEVICE.new_event,
        )
        yield SimpleNamespace(memory=memory, store=store, staging=staging)


def _values() -> torch.Tensor:
    """A tensor of some chunks, each with another value: what is overtaken is seen."""
    return torch.arange(1, CHUNKS + 1, dtype=DTYPE).repeat_interleave(NUMEL)


def measure_slots(folder: Path, broken: bool) -> dict[str, Any]:
    """Two shards share the one slot of a budget: one is copied from while the other is read."""
    with _parts(folder) as parts:
        pool = Pool(memory=parts.memory, component="parameter slots", budget_bytes=4 * SLOT_BYTES)
        pool.resize(SLOT_BYTES, slot_bytes_max=SLOT_BYTES)
        stream = ParameterStream(
            store=parts.store, pool=pool, staging=parts.staging, device=torch.device(DEVICE.name)
        )
        shards = [stream.shard(f"param.{number}", NUMEL, DTYPE) for number in (1, 2)]
        for value, shard in enumerate(shards, start=1):
            slot = stream.stage(shard)
            assert slot is not None
            slot.fill_(value)
            stream.write(shard)
        first, second = shards
        stream.read_now([first])
        target = torch.zeros(NUMEL, dtype=DTYPE, device=DEVICE.name)
        with DEVICE.behind_something_long():
            target.copy_(first.tensor, non_blocking=True)
            stream.let_go(first, None if broken else DEVICE.event())
            waited_s = _seconds_of_read(stream, second)
        intact = bool((target == 1).all()) and bool((second.tensor == 2).all())
        has_slot = second.lease is not None
        stream.drop_all()
    return {"intact": intact, "waited_s": waited_s, "shared": has_slot}


def _seconds_of_read(stream: ParameterStream, shard: Any) -> float:
    started_s = time.perf_counter()
    stream.read_now([shard])
    return time.perf_counter() - started_s


def measure_staging(folder: Path, broken: bool) -> dict[str, Any]:
    """A tensor of more chunks than slots is read to the device, which takes them late."""
    expected = _values()
    with _parts(folder, broken=broken) as parts:
        parts.store.write(key="param.1", source=expected).wait()
        target = torch.zeros(expected.numel(), dtype=DTYPE, device=DEVICE.name)
        started_s = time.perf_counter()
        with DEVICE.behind_something_long():
            parts.staging.read(key="param.1", target=target)
            waited_s = time.perf_counter() - started_s
        intact = bool((target.cpu() == expected).all())
    return {"intact": intact, "waited_s": waited_s, "shared": True}


def measure_tiles(folder: Path, broken: bool) -> dict[str, Any]:
    """A gradient that the device is late with goes to the drive, and tiles of it are read."""
    expected = _values()
    with _parts(folder, broken=broken) as parts:
        parts.store.reserve(key="gradient.1", nbytes=expected.nbytes)
        shape = TileShape(
            numel=NUMEL // 2,
            count=2,
            state_count=2,
            master_dtype=DTYPE,
            state_dtype=DTYPE,
            gradient_dtype=DTYPE,
            parameter_dtype=torch.bfloat16,
        )
        tiles = TileMemory(store=parts.store, memory=parts.memory, shape=shape)
        source = torch.zeros(expected.numel(), dtype=DTYPE, device=DEVICE.name)
        values = expected.to(DEVICE.name)
        started_s = time.perf_counter()
        with DEVICE.behind_something_long():
            source.copy_(values)
            parts.staging.write(key="gradient.1", source=source)
            parts.staging.wait_writes()
            waited_s = time.perf_counter() - started_s
        intact = True
        for begin in tiles.begins(expected.numel()):
            tile = tiles.take("1", begin, expected.numel())
            tiles.read(tile, "gradient.1", tile.raw)
            tile.transfers.wait()
            found = tile.raw.narrow(0, 0, tile.numel)
            intact = intact and bool((found == expected.narrow(0, begin, tile.numel)).all())
            tiles.retire(tile)
        tiles.drain()
    return {"intact": intact, "waited_s": waited_s, "shared": True}


def judge_order(figures: Figures) -> list[str]:
    """Wants whole data, in memory that was really used twice."""
    problems = []
    if not figures["intact"]:
        problems.append("memory was used again before the device was done with it")
    if not figures["shared"]:
        problems.append("the second shard found another place, so that nothing was tried")
    return problems


CHECKS = (
    Check(
        "slots",
        "a slot of the parameter budget is not filled before the copy out of it has passed",
        measure_slots,
        judge_order,
        "the slot is let go without an event",
    ),
    Check(
        "staging",
        "chunks of a tensor reach a device that takes them late",
        measure_staging,
        judge_order,
        "staging slots without events",
    ),
    Check(
        "tiles",
        "a gradient that the device is late with is whole in the optimizer's tiles",
        measure_tiles,
        judge_order,
        "staging slots without events",
    ),
)
