"""How much memory does loading pretrained weights take as the checkpoint grows?

A sharded safetensors checkpoint of the same Llama at growing depth is loaded with `from_pretrained`
into a ZeRO-3 model on the drive, by stock and with memascend, on one rank and on two, each in fresh
processes. Counted on rank 0 is what it holds above what it held when everything was imported:
memory of its own, and pages of files; and how much of the checkpoint is in the page cache. What was
loaded is compared bit by bit.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
from bench_memory import slope
from trainee import (
    MALLOC_MMAP_THRESHOLD_BYTES,
    MARK,
    SHARED_MEMORY,
    Model,
    deepspeed_config,
    free_port,
    model_of,
)

from memascend.system.memory import process_status

QUESTION = "Loading: memory of rank 0 as the checkpoint grows, above what imports take"
PROGRAM = Path(__file__).parent / "load_program.py"
SIZES = {"small": [40_000_000, 120_000_000], "large": [160_000_000, 320_000_000, 640_000_000]}
WORLDS = {"small": [1], "large": [1, 2]}
SHARD = "50MB"
STOCK, OURS = "stock", "memascend"
BLOCK = {"host_memory_limit": "64MiB"}
INTERVAL_S = 0.004
#: Asking for the pages in the cache takes longer than reading /proc: each so many samples.
CACHE_SAMPLES = 8


class Watch:
    """Peaks of one process and of the page cache, from a thread of its own."""

    def __init__(self, pid: int, files: list[Path]) -> None:
        self._pid, self._files = pid, files
        self._before = process_status(pid)
        self.peaks = {"RssAnon": 0, "RssFile": 0, "cached": 0}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, int]:
        """Gives the peaks in bytes."""
        self._stopping.set()
        self._thread.join()
        return self.peaks

    def _run(self) -> None:
        count = 0
        while not self._stopping.wait(INTERVAL_S):
            now = process_status(self._pid)
            for key in ("RssAnon", "RssFile"):
                self.peaks[key] = max(self.peaks[key], now.get(key, 0) - self._before[key])
            if count % CACHE_SAMPLES == 0:
                self.peaks["cached"] = max(self.peaks["cached"], cached_bytes(self._files))
            count += 1


def cached_bytes(files: list[Path]) -> int:
    """How much of some files is in the page cache."""
    libc = ctypes.CDLL(None)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    pages = 0
    for path in files:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as view:
            states = ctypes.create_string_buffer(-(-len(view) // mmap.PAGESIZE))
            start = ctypes.c_char.from_buffer(view)
            libc.mincore(ctypes.addressof(start), len(view), states)
            del start
            pages += sum(state & 1 for state in states.raw)
    return pages * mmap.PAGESIZE


def drop_cached(files: list[Path]) -> None:
    """Makes every contender begin with nothing of the files in memory."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def save(model: Model, folder: Path) -> list[Path]:
    """A sharded checkpoint of random weights; gives its shards."""
    import torch
    import transformers

    torch.manual_seed(0)
    built = transformers.LlamaForCausalLM(transformers.LlamaConfig(**model.shape, use_cache=False))
    built.to(torch.bfloat16).save_pretrained(folder, max_shard_size=SHARD)
    return sorted(folder.glob("*.safetensors"))


def config_of(model: Model, drive: Path, block: dict[str, Any] | None) -> dict[str, Any]:
    """The same for both but for the block."""
    config = deepspeed_config(
        directory=drive,
        zero={"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0},
        parameters={"buffer_count": 4, "buffer_size": model.largest_numel},
        optimizer={"buffer_count": 4},
    )
    return config if block is None else config | {"memascend": block}


def load(model: Model, contender: str, world: int, folder: Path) -> dict[str, Any]:
    """One load by `world` ranks; what rank 0 said, and its peaks.

    Raises:
        RuntimeError: A rank failed; the message has the end of what it printed.
    """
    shards = sorted(folder.glob("*.safetensors"))
    drop_cached(shards)
    block = BLOCK if contender == OURS else None
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="drive-") as drive:
        command = [sys.executable, str(PROGRAM), "--checkpoint", str(folder)]
        command += ["--config", json.dumps(config_of(model, Path(drive), block))]
        with _ranks(command, world) as processes:
            return _watched(processes, shards)


@contextmanager
def _ranks(command: list[str], world: int) -> Iterator[list[subprocess.Popen[str]]]:
    port = free_port()
    common = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            [str(PROGRAM.parent.parent), os.environ.get("PYTHONPATH", "")]
        ),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "DS_ACCELERATOR": "cpu",
        "MALLOC_MMAP_THRESHOLD_": str(MALLOC_MMAP_THRESHOLD_BYTES),
    }
    for variable in ("MEMASCEND_CONFIG", "MEMASCEND_DISABLE"):
        common.pop(variable, None)
    processes = []
    try:
        for rank in range(world):
            environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            processes.append(
                subprocess.Popen(
                    command, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True
                )
            )
        yield processes
    finally:
        for process in processes:
            process.terminate()
            process.wait()
        for path in SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            path.unlink(missing_ok=True)


def _watched(processes: list[subprocess.Popen[str]], shards: list[Path]) -> dict[str, Any]:
    first = processes[0]
    assert first.stdout is not None
    log: list[str] = []
    found: dict[str, Any] = {}
    watch: Watch | None = None
    for line in first.stdout:
        if not line.startswith(MARK):
            log.append(line)
            continue
        answer = json.loads(line.removeprefix(MARK))
        if answer["event"] == "baseline":
            watch = Watch(first.pid, shards)
        elif answer["event"] == "loaded" and watch is not None:
            found |= watch.stop() | {"cached_after": cached_bytes(shards)}
        found |= answer
    statuses = [process.wait() for process in processes]
    if any(statuses):
        raise RuntimeError(f"ranks ended with {statuses}; the first printed:\n{''.join(log[-20:])}")
    return found


def run(*, small: bool, directory: Path) -> Iterator[harness.Row]:
    """Loads every size with both, then gives the slopes over the sizes."""
    size = "small" if small else "large"
    measured: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(dir=directory, prefix="memascend-bench-") as folder:
        for numel in SIZES[size]:
            model = model_of(numel)
            checkpoint = Path(folder, "checkpoint")
            shards = save(model, checkpoint)
            nbytes = sum(path.stat().st_size for path in shards)
            for world in WORLDS[size]:
                for contender in (STOCK, OURS):
                    row = _row(model, contender, world, checkpoint, nbytes)
                    points = measured.setdefault((contender, world), [])
                    points.append((nbytes / 1e6, row.figures["own_mb"] + row.figures["files_mb"]))
                    yield row
            shutil.rmtree(checkpoint)
    for (contender, world), points in measured.items():
        yield harness.Row(
            "loading",
            f"slope, {world} rank(s)",
            contender,
            {"mb_per_file_mb": slope(points)},
            {"points": points},
            harness.machine(directory),
        )


def _row(model: Model, contender: str, world: int, checkpoint: Path, nbytes: int) -> harness.Row:
    found = load(model, contender, world, checkpoint)
    figures = {
        "file_mb": nbytes / 1e6,
        "own_mb": found["RssAnon"] / 1e6,
        "files_mb": found["RssFile"] / 1e6,
        "cache_mb": found["cached"] / 1e6,
        "cache_after_mb": found["cached_after"] / 1e6,
        "read_mb": found["read"] / 1e6,
        "seconds": found["seconds"],
    }
    config = {"sha256": found["sha256"], "report": found["report"], "shape": model.shape}
    case = f"{model.numel / 1e6:.0f}M, {world} rank(s)"
    machine = harness.machine(checkpoint)
    return harness.Row("loading", case, contender, figures, config, machine)


def run_and_report(options: argparse.Namespace) -> None:
    """What the command line asks for."""
    rows = harness.collect(run(small=options.small, directory=options.directory))
    harness.report("loading", QUESTION, rows, options.out)


if __name__ == "__main__":
    run_and_report(harness.parser(__doc__ or "").parse_args())
