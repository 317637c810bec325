"""How fast is the store, and how much CPU does it take, against DeepSpeed's aio_handle?

Each run writes or reads all tensors of a case and waits for them, the way the swappers of both do:
DeepSpeed one file per tensor, we one key per tensor. Buffers are what each brings: ours huge-page
backed blocks, DeepSpeed's its own page-locked tensor; a third contender is DeepSpeed's handle on
such a tensor moved into huge pages, to tell the engine's share of a gain from the pages'. All
bypass the page cache. What was read is compared with what was written, since DeepSpeed's handle
does not report a failed transfer.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import harness
import torch

from memascend.base.sizes import BOUNCE_BYTES
from memascend.base.units import KIB, MIB, format_nbytes
from memascend.errors import EngineUnavailableError
from memascend.memory.allocator import HostAllocator
from memascend.nvme.store import TensorStore

QUESTION = "NVMe: throughput and CPU against DeepSpeed's aio_handle"
# (bytes of a tensor, tensors)
CASES = {
    "small": [(64 * KIB, 8), (1 * MIB, 2)],
    "large": [(64 * KIB, 2000), (1 * MIB, 300), (16 * MIB, 32), (256 * MIB, 2)],
}
HUGE_PAGE_BYTES = 2 * MIB
MADV_COLLAPSE = 25  # Linux 6.1; Python's mmap module does not know it
ROUNDS = {"small": 2, "large": 7}
ENGINES = ("uring", "libaio", "threads")
STOCK = "DeepSpeed aio"
STOCK_HUGE = "DeepSpeed aio, huge pages"
URING = "memascend uring"
# The values DeepSpeed takes without an "aio" section.
STOCK_SETTINGS = {
    "block_size": MIB,
    "queue_depth": 8,
    "single_submit": False,
    "overlap_events": True,
    "intra_op_parallelism": 1,
}


class _Side(Protocol):
    """One way to move `count` tensors of `nbytes` each between its buffer and the disk."""

    buffer: torch.Tensor

    def write(self, nbytes: int, count: int) -> None: ...
    def read(self, nbytes: int, count: int) -> None: ...
    def clear(self, count: int) -> None: ...


@dataclass(slots=True)
class _StoreSide:
    """Ours: keys of one store."""

    store: TensorStore
    buffer: torch.Tensor

    def write(self, nbytes: int, count: int) -> None:
        started = self._pieces(nbytes, count)
        for ticket in [self.store.write(key=key, source=piece) for key, piece in started]:
            ticket.wait()

    def read(self, nbytes: int, count: int) -> None:
        started = self._pieces(nbytes, count)
        for ticket in [self.store.read(key=key, target=piece) for key, piece in started]:
            ticket.wait()

    def clear(self, count: int) -> None:
        for index in range(count):
            self.store.discard(key=f"tensor{index}")

    def _pieces(self, nbytes: int, count: int) -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(count):
            yield f"tensor{index}", self.buffer.narrow(0, index * nbytes, nbytes)


@dataclass(slots=True)
class _DeepSpeedSide:
    """DeepSpeed's: files of one directory."""

    handle: Any
    directory: Path
    buffer: torch.Tensor

    def write(self, nbytes: int, count: int) -> None:
        self._run(self.handle.async_pwrite, nbytes, count)

    def read(self, nbytes: int, count: int) -> None:
        self._run(self.handle.async_pread, nbytes, count)

    def clear(self, count: int) -> None:
        for index in range(count):
            self._path(index).unlink()

    def _run(self, start: Callable[..., int], nbytes: int, count: int) -> None:
        for index in range(count):
            piece = self.buffer.narrow(0, index * nbytes, nbytes)
            if start(piece, str(self._path(index)), 0) != 0:
                raise RuntimeError(f"DeepSpeed refused tensor {index} of {nbytes} bytes")
        if self.handle.wait() != count:
            raise RuntimeError(f"DeepSpeed lost some of {count} transfers of {nbytes} bytes")

    def _path(self, index: int) -> Path:
        return self.directory / f"{index}.tensor"


def run(*, small: bool, directory: Path, with_deepspeed: bool = True) -> Iterator[harness.Row]:
    """Measures every case below `directory`; a side that cannot run gives one row that says why."""
    size = "small" if small else "large"
    buffer_bytes = max(nbytes * count for nbytes, count in CASES[size])
    circumstances = harness.machine(directory)
    with _sides(directory, buffer_bytes, with_deepspeed) as (sides, refusals):
        for name, reason in refusals.items():
            yield harness.Row(
                "nvme", "all", name, {"not_run": reason}, STOCK_SETTINGS, circumstances
            )
        for nbytes, count in CASES[size]:
            config = {"nbytes": nbytes, "count": count, "rounds": ROUNDS[size]} | STOCK_SETTINGS
            for case, figures in _run_case(sides, nbytes, count, ROUNDS[size]):
                for name, row_figures in figures.items():
                    yield harness.Row("nvme", case, name, row_figures, config, circumstances)


def _run_case(
    sides: dict[str, _Side], nbytes: int, count: int, rounds: int
) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    expected = torch.randint(0, 256, (nbytes * count,), dtype=torch.uint8)
    for side in sides.values():
        side.buffer[: nbytes * count] = expected
    title = f"{format_nbytes(nbytes)} x {count}"
    yield f"{title} write", _measure(sides, "write", nbytes, count, rounds)
    for side in sides.values():
        side.buffer.zero_()
    yield f"{title} read", _measure(sides, "read", nbytes, count, rounds)
    for name, side in sides.items():
        if not torch.equal(side.buffer[: nbytes * count], expected):
            raise RuntimeError(f"{name} read other bytes than it wrote: {title}")
        side.clear(count)


def _measure(
    sides: dict[str, _Side], operation: str, nbytes: int, count: int, rounds: int
) -> dict[str, dict[str, Any]]:
    contenders = [
        harness.Contender(name, _bound(getattr(side, operation), nbytes, count))
        for name, side in sides.items()
    ]
    samples = harness.interleave(contenders, rounds=rounds)
    gigabytes = nbytes * count / 1e9
    figures: dict[str, dict[str, Any]] = {}
    for name, taken in samples.items():
        figures[name] = {
            "gb_per_s": harness.spread([gigabytes / sample.wall_s for sample in taken]),
            "cpu_ms_per_gb": harness.spread([sample.cpu_s * 1e3 / gigabytes for sample in taken]),
        }
        if URING in samples:
            figures[name]["to_uring"] = harness.speedup(taken, samples[URING])
        if STOCK in samples:
            figures[name]["speedup"] = harness.speedup(taken, samples[STOCK])
            figures[name]["cpu_share"] = harness.cpu_share(taken, samples[STOCK])
    return figures


def _bound(operation: Callable[[int, int], None], nbytes: int, count: int) -> Callable[[], None]:
    return lambda: operation(nbytes, count)


@contextmanager
def _sides(
    directory: Path, buffer_bytes: int, with_deepspeed: bool
) -> Iterator[tuple[dict[str, _Side], dict[str, str]]]:
    """Gives the sides that can run here, and for each other one the reason."""
    sides: dict[str, _Side] = {}
    refusals: dict[str, str] = {}
    with ExitStack() as stack:
        parent = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=directory)))
        for name in (STOCK, STOCK_HUGE):
            if not with_deepspeed:
                refusals[name] = "left out (--without-deepspeed)"
                continue
            try:
                stock = _open_deepspeed(parent / name, buffer_bytes)
                stack.callback(stock.handle.free_cpu_locked_tensor, stock.buffer)
                if name == STOCK_HUGE:
                    _move_into_huge_pages(stock.buffer)
                sides[name] = stock
            except (ImportError, RuntimeError, OSError) as error:
                refusals[name] = f"{type(error).__name__}: {error}"
        allocator = HostAllocator()
        buffer = allocator.tensor(buffer_bytes, torch.uint8, component="bench")
        for engine in ENGINES:
            bounce = allocator.tensor(BOUNCE_BYTES, torch.uint8, component="bench")
            try:
                store = TensorStore(volumes=[parent], bounce=bounce, engine=engine)
            except EngineUnavailableError as error:
                refusals[f"memascend {engine}"] = str(error)
                continue
            stack.callback(store.close)
            sides[f"memascend {engine}"] = _StoreSide(store, buffer)
        yield sides, refusals


def _open_deepspeed(directory: Path, buffer_bytes: int) -> _DeepSpeedSide:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    directory.mkdir()
    handle = AsyncIOBuilder().load().aio_handle(**STOCK_SETTINGS)
    buffer = handle.new_cpu_locked_tensor(buffer_bytes, torch.empty(0, dtype=torch.uint8))
    return _DeepSpeedSide(handle, directory, buffer)


def _move_into_huge_pages(buffer: torch.Tensor) -> None:
    """Makes huge pages of all whole ones within the buffer, or raises OSError."""
    address = buffer.data_ptr()
    start = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (address + buffer.nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    buffer.zero_()  # only what is there can be moved
    libc = ctypes.CDLL(None, use_errno=True)
    span = (ctypes.c_void_p(start), ctypes.c_size_t(end - start))
    if libc.madvise(*span, MADV_COLLAPSE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"MADV_COLLAPSE of {end - start} bytes: {os.strerror(code)}")


def run_and_report(options: argparse.Namespace) -> None:
    rows = run(
        small=options.small,
        directory=options.directory,
        with_deepspeed=not options.without_deepspeed,
    )
    harness.report("nvme", QUESTION, list(rows), options.out)


if __name__ == "__main__":
    run_and_report(harness.parser(QUESTION).parse_args())
