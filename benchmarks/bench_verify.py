"""What does verification cost, as a part of the time and of the CPU that the store takes without?

Three stores on one directory, with verify off, reads and full, write or read the same tensors in
turns. Beside them the checksum alone: the processor's instruction and tables, over one grain that
stays in the caches and over more than they hold.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import harness
import torch

from memascend import _core
from memascend.base.sizes import BOUNCE_BYTES
from memascend.base.units import KIB, MIB, format_nbytes, page_up
from memascend.memory.allocator import HostAllocator
from memascend.nvme.store import TensorStore

QUESTION = "verify: the cost of checksums, and of reading back"
WAYS = ("off", "reads", "full")
# (bytes of a tensor, tensors); the odd size ends within a grain.
CASES = {
    "small": [(64 * KIB, 8), (1_000_000, 2)],
    "large": [(64 * KIB, 2000), (1_000_000, 300), (16 * MIB, 32), (256 * MIB, 2)],
}
CHECKSUM_BYTES = {"small": [64 * KIB], "large": [64 * KIB, 256 * MIB]}
#: So that one run takes long enough to be timed.
CHECKSUM_TOTAL_BYTES = {"small": MIB, "large": 256 * MIB}
ROUNDS = {"small": 2, "large": 7}


def run(*, small: bool, directory: Path) -> Iterator[harness.Row]:
    """Measures every case; yields a row for each way of each."""
    size = "small" if small else "large"
    rounds = ROUNDS[size]
    circumstances = harness.machine(directory)
    arena = HostAllocator()
    buffer_bytes = max(page_up(nbytes) * count for nbytes, count in CASES[size])
    buffer = arena.tensor(buffer_bytes, torch.uint8, component="bench")
    buffer.copy_(torch.randint(0, 256, (buffer_bytes,), dtype=torch.uint8))
    for nbytes in CHECKSUM_BYTES[size]:
        config = {"nbytes": nbytes, "rounds": rounds}
        case = f"crc32c of {format_nbytes(nbytes)}"
        for name, figures in _measure_checksum(buffer, nbytes, CHECKSUM_TOTAL_BYTES[size], rounds):
            yield harness.Row("verify", case, name, figures, config, circumstances)
    with ExitStack() as stack:
        parent = stack.enter_context(tempfile.TemporaryDirectory(dir=directory))
        stores = {}
        for way in WAYS:
            bounce = arena.tensor(BOUNCE_BYTES, torch.uint8, component="bench")
            store = TensorStore(volumes=[parent], bounce=bounce, verify=way)
            stores[way] = stack.enter_context(store)
        for nbytes, count in CASES[size]:
            config = {"nbytes": nbytes, "count": count, "rounds": rounds}
            for operation in ("write", "read"):
                case = f"{format_nbytes(nbytes)} x {count} {operation}"
                measured = _measure_stores(stores, buffer, operation, nbytes, count, rounds)
                for way, figures in measured:
                    yield harness.Row("verify", case, way, figures, config, circumstances)
            for store in stores.values():
                for index in range(count):
                    store.discard(key=f"tensor{index}")


def _measure_checksum(
    buffer: torch.Tensor, nbytes: int, total_bytes: int, rounds: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    def work(method: _core.Crc32cMethod) -> Callable[[], None]:
        def checksum() -> None:
            for _ in range(max(1, total_bytes // nbytes)):
                method.checksum(address=buffer.data_ptr(), nbytes=nbytes)

        return checksum

    contenders = [harness.Contender(method.name, work(method)) for method in _core.crc32c_methods()]
    samples = harness.interleave(contenders, rounds=rounds)
    gigabytes = max(1, total_bytes // nbytes) * nbytes / 1e9
    for name, taken in samples.items():
        cpu_ms = [sample.cpu_s * 1e3 / gigabytes for sample in taken]
        yield (
            name,
            {
                "gb_per_s": harness.spread([gigabytes / sample.wall_s for sample in taken]),
                "cpu_ms_per_gb": harness.spread(cpu_ms),
            },
        )


def _measure_stores(
    stores: dict[str, TensorStore],
    buffer: torch.Tensor,
    operation: str,
    nbytes: int,
    count: int,
    rounds: int,
) -> Iterator[tuple[str, dict[str, Any]]]:
    # Each tensor begins where a page does, as those of an arena do.
    stride = page_up(nbytes)
    pieces = [buffer.narrow(0, index * stride, nbytes) for index in range(count)]

    def work(store: TensorStore) -> Callable[[], None]:
        def transfer() -> None:
            if operation == "write":
                tickets = [
                    store.write(key=f"tensor{i}", source=piece) for i, piece in enumerate(pieces)
                ]
            else:
                tickets = [
                    store.read(key=f"tensor{i}", target=piece) for i, piece in enumerate(pieces)
                ]
            for ticket in tickets:
                ticket.wait()

        return transfer

    contenders = [harness.Contender(way, work(store)) for way, store in stores.items()]
    samples = harness.interleave(contenders, rounds=rounds)
    gigabytes = nbytes * count / 1e9
    for way, taken in samples.items():
        cpu_ms = [sample.cpu_s * 1e3 / gigabytes for sample in taken]
        figures = {
            "gb_per_s": harness.spread([gigabytes / sample.wall_s for sample in taken]),
            "cpu_ms_per_gb": harness.spread(cpu_ms),
            "time_to_off": harness.speedup(samples["off"], taken),
        }
        yield way, figures


def run_and_report(options: argparse.Namespace) -> None:
    rows = run(small=options.small, directory=options.directory)
    harness.report("verify", QUESTION, list(rows), options.out)


if __name__ == "__main__":
    run_and_report(harness.parser(QUESTION).parse_args())
