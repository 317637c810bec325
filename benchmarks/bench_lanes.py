"""What do drives gain and lose by each other? Every one has a lane of its own.

The drives are the memory engine's, so that nothing but the lanes is measured. First each takes a
stated time for a request, one after the other: are two of them twice as fast as one? Then one of
two is silent: how long do reads of the other take, against a store without it?

With `--ranks` it is one drive, a real one, and several processes: see ranks.py.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import harness
import ranks
import torch

from memascend import _core
from memascend.base.units import GIB, KIB, MIB
from memascend.memory.allocator import HostAllocator
from memascend.nvme.store import MemoryFaults, TensorStore

RANKS_QUESTION = "lanes: several ranks on one drive"
QUESTION = "lanes: two drives against one, and a drive beside a silent one"
SERVICE_MILLISECONDS = 4
REQUEST_BYTES = MIB
READ_BYTES = 64 * KIB
REQUEST_COUNT = {"small": 16, "large": 64}
READ_COUNT = {"small": 100, "large": 3000}
ROUNDS = {"small": 2, "large": 9}
RANK_COUNTS = (2, 4)
RANK_BYTES = {"small": 32 * MIB, "large": GIB}


def run(*, small: bool, directory: Path) -> Iterator[harness.Row]:
    """Measures both cases; yields a row for each contender."""
    size = "small" if small else "large"
    circumstances = harness.machine(directory)
    arena = HostAllocator()
    with ExitStack() as stores:
        config = {
            "service_milliseconds": SERVICE_MILLISECONDS,
            "request_bytes": REQUEST_BYTES,
            "count": REQUEST_COUNT[size],
            "rounds": ROUNDS[size],
        }
        for name, figures in _two_drives(arena, stores, REQUEST_COUNT[size], ROUNDS[size]):
            yield harness.Row("lanes", "two drives", name, figures, config, circumstances)
        config = {"nbytes": READ_BYTES, "count": READ_COUNT[size], "rounds": ROUNDS[size]}
        for name, figures in _beside_silence(arena, stores, READ_COUNT[size], ROUNDS[size]):
            yield harness.Row("lanes", "beside a silent one", name, figures, config, circumstances)


def _open(
    arena: HostAllocator, stores: ExitStack, names: list[str], faults: MemoryFaults
) -> TensorStore:
    volumes = [_core.VolumeOptions(name) for name in names]
    bounce = arena.tensor(MIB, torch.uint8, component="bench")
    store = TensorStore(
        volumes=volumes,
        bounce=bounce,
        engine="memory",
        chunk_bytes=REQUEST_BYTES,
        faults=faults,
    )
    return stores.enter_context(store)


def _two_drives(
    arena: HostAllocator, stores: ExitStack, count: int, rounds: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    nbytes = count * REQUEST_BYTES
    memory = arena.tensor(nbytes, torch.uint8, component="bench")
    contenders = []
    for name, drives in (("one drive", ["a"]), ("two drives", ["a", "b"])):
        faults = MemoryFaults()
        store = _open(arena, stores, drives, faults)
        store.write(key="k", source=memory).wait()
        faults.slow_milliseconds = SERVICE_MILLISECONDS
        faults.slow_volume = MemoryFaults.EVERY_VOLUME
        contenders.append(
            harness.Contender(name, lambda store=store: store.read(key="k", target=memory).wait())
        )
    samples = harness.interleave(contenders, rounds=rounds)
    for name, taken in samples.items():
        yield (
            name,
            {
                "ms_per_request": harness.spread([1e3 * one.wall_s / count for one in taken]),
                "speedup": harness.speedup(taken, samples["one drive"]),
            },
        )


def _beside_silence(
    arena: HostAllocator, stores: ExitStack, count: int, rounds: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    memory = arena.tensor(READ_BYTES, torch.uint8, component="bench")
    silent = arena.tensor(READ_BYTES, torch.uint8, component="bench")
    times: dict[str, list[float]] = {}

    def reads(name: str, store: TensorStore, key: str) -> None:
        taken = []
        for _ in range(count):
            began = time.perf_counter()
            store.read(key=key, target=memory).wait()
            taken.append(time.perf_counter() - began)
        times.setdefault(name, []).append(1e6 * sorted(taken)[int(0.99 * count)])

    alone = _open(arena, stores, ["b"], MemoryFaults())
    alone.write(key="on b", source=memory).wait()
    faults = MemoryFaults()
    beside = _open(arena, stores, ["a", "b"], faults)
    for key in ("on a", "on b"):  # each goes where least lies
        beside.write(key=key, source=memory).wait()
    assert [volume.used_bytes for volume in beside.core.volume_stats()] == [READ_BYTES] * 2
    faults.paused_volume = 0
    waiting = beside.read(key="on a", target=silent)
    contenders = [
        harness.Contender("alone", lambda: reads("alone", alone, "on b")),
        harness.Contender("beside", lambda: reads("beside", beside, "on b")),
    ]
    try:
        harness.interleave(contenders, rounds=rounds)
        assert not waiting.done()
    finally:
        faults.paused_volume = -1  # else closing would wait for ever
    waiting.wait()
    base = times["alone"][-rounds:]
    for name, all_taken in times.items():
        taken = all_taken[-rounds:]  # less the round that warms up
        ratios = [one / other for one, other in zip(taken, base, strict=True)]
        yield name, {"p99_us": harness.spread(taken), "to_alone": harness.spread(ratios)}


def run_ranks(*, small: bool, directory: Path) -> Iterator[harness.Row]:
    """Measures reads and writes of each number of ranks; yields a row for each."""
    size = "small" if small else "large"
    circumstances = harness.machine(directory)
    config = {"nbytes": RANK_BYTES[size], "rounds": ROUNDS[size]}
    for count in RANK_COUNTS:
        found = ranks.measure(directory, count=count, nbytes=RANK_BYTES[size], rounds=ROUNDS[size])
        for verb, figures in found:
            yield harness.Row("lanes", f"{count} ranks", verb, figures, config, circumstances)


def run_and_report(options: argparse.Namespace) -> None:
    if getattr(options, "ranks", False):  # benchmarks/run.py knows no such option
        rows = harness.collect(run_ranks(small=options.small, directory=options.directory))
        harness.report("lanes-ranks", RANKS_QUESTION, rows, options.out)
        return
    rows = run(small=options.small, directory=options.directory)
    harness.report("lanes", QUESTION, list(rows), options.out)


if __name__ == "__main__":
    arguments = harness.parser(QUESTION)
    arguments.add_argument("--ranks", action="store_true", help=RANKS_QUESTION)
    run_and_report(arguments.parse_args())
