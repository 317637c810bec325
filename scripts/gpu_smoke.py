#!/usr/bin/env python3
"""What can only be seen on a CUDA device. Started by gpu_smoke.sh and tests/device/test_gpu.py.

Every check is a function that gives findings; none needs another. Nothing here uses CUDA while it
is imported.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from memascend.base.units import MIB, format_nbytes, page_up
from memascend.memory.allocator import HostAllocator, describe
from memascend.memory.pool import Pool
from memascend.nvme.store import TensorStore
from memascend.plan.knobs import BOUNCE_BYTES
from memascend.streaming.parameters import ParameterStream

ROOT = Path(__file__).resolve().parent.parent
STATUS_SKIPPED = 77
PARITY_STEPS = 3
SHARD_NUMEL = 16 * MIB // 2  # of fp16; a copy of it takes long enough to be overtaken
SLOW_CYCLES = 2_000_000_000  # about a second on today's devices
BANDWIDTH_BYTES = 256 * MIB
BANDWIDTH_ROUNDS = 9
# A lease is page-locked memory like torch's own; less than this of its speed is a fault.
LEASE_TO_PINNED_MIN = 0.9

# finetune.py with every source of chance off that is not memascend's: parity is to the last bit.
DETERMINISTIC = """
import runpy, sys
import torch
import memascend
torch.use_deterministic_algorithms(True, warn_only=True)
torch.utils.deterministic.fill_uninitialized_memory = False  # would hide reads of garbage
torch.backends.cuda.enable_flash_sdp(False)
torch.backends.cuda.enable_mem_efficient_sdp(False)
torch.backends.cuda.enable_cudnn_sdp(False)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
from memascend.deepspeed.seams.arm import is_armed
print("seams armed:", is_armed())
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the result."""

    check: str
    passed: bool
    found: str


# -- parity --------------------------------------------------------------------------------------


def check_parity(folder: Path) -> list[Finding]:
    """Losses with the block equal those of DeepSpeed's CPU offload, digit by digit."""
    findings = []
    for dtype in ("bf16", "fp16"):
        oracle = train(folder, dtype, device="cpu", block=None)
        ours = train(folder, dtype, device="nvme", block={})
        passed = len(oracle) == PARITY_STEPS and oracle == ours
        found = f"{len(ours)} losses equal: {', '.join(ours)}"
        if not passed:
            again = train(folder, dtype, device="cpu", block=None)
            repeats = "repeats" if again == oracle else "DOES NOT REPEAT"
            found = f"CPU offload {oracle} ({repeats}), memascend {ours}"
        findings.append(Finding(f"parity {dtype}", passed, found))
    return findings


def train(folder: Path, dtype: str, *, device: str, block: dict[str, Any] | None) -> list[str]:
    """Trains the tiny model in a process of its own and gives the printed losses.

    Raises:
        RuntimeError: The run failed, or ran without the plugin though there was a block.
    """
    config_file = folder / f"{device}-{dtype}.json"
    config_file.write_text(json.dumps(tiny_config(folder, device, block)), encoding="utf-8")
    command = [sys.executable, "-c", DETERMINISTIC, str(ROOT / "scripts" / "finetune.py")]
    command += ["--deepspeed_config", str(config_file), "--model", "qwen2.5-tiny"]
    command += ["--steps", str(PARITY_STEPS), "--dtype", dtype]
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    for name in ("MEMASCEND_CONFIG", "MEMASCEND_DISABLE"):
        environment.pop(name, None)
    if block is None:
        environment["MEMASCEND_DISABLE"] = "1"
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,  # DeepSpeed may have to compile its operators first
        env=environment,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{device} {dtype} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    is_armed = "\nseams armed: True\n" in done.stdout
    if is_armed != (block is not None):
        raise RuntimeError(f"{device} {dtype}: armed is {is_armed}:\n{done.stdout[-4000:]}")
    return re.findall(r"^step \d+ loss (\S+) time", done.stdout, re.MULTILINE)


def tiny_config(folder: Path, device: str, block: dict[str, Any] | None) -> dict[str, Any]:
    """The CPU configuration at the scale of the tiny models."""
    config: dict[str, Any] = json.loads((ROOT / "configs" / "nvme_cpu.json").read_text())
    zero = config["zero_optimization"]
    zero["offload_param"].update(device=device, buffer_size=4096 * 384, nvme_path=str(folder))
    zero["offload_optimizer"].update(device=device, nvme_path=str(folder))
    zero["stage3_prefetch_bucket_size"] = 0
    return config if block is None else {**config, "memascend": block}


# -- page-locked memory --------------------------------------------------------------------------


def check_pinned(folder: Path) -> list[Finding]:
    """Tensors of a registered arena are pinned memory to torch."""
    allocator = device_allocator()
    tensor = allocator.tensor(SHARD_NUMEL, torch.float16, component="smoke")
    view = tensor[SHARD_NUMEL // 2 :]
    report = allocator.core.report()
    is_pinned = tensor.is_pinned() and view.is_pinned()
    registered = report.registered_bytes >= tensor.nbytes
    notes = "; ".join(allocator.core.notes())
    return [
        Finding("pinned", is_pinned, f"is_pinned() is {is_pinned} for a tensor and its view"),
        Finding("registered", registered, f"{describe(report)}{'; ' if notes else ''}{notes}"),
    ]


def device_allocator() -> HostAllocator:
    """An allocator that registers its memory with the current device."""
    torch.zeros(1, device="cuda")  # registration needs a context; torch makes it at first use
    return HostAllocator(register_device=True)


# -- order of copies and reads -------------------------------------------------------------------


def check_event_order(folder: Path) -> list[Finding]:
    """A slot is not filled again before a slow copy out of it has passed.

    Two shards share the only slot of a pool. The copy of the first to the device waits behind a
    long kernel; meanwhile the second is read. With the swapper's own event the first arrives whole.
    As a control the slot is given back without one: then the copy must have taken the second
    shard's bytes, or this check could not fail.
    """
    with two_shards(folder) as shards:
        kept, waited_s = overtake(shards, with_event=True)
        control, _ = overtake(shards, with_event=False)
    return [
        Finding(
            "event order",
            kept,
            f"data {'intact' if kept else 'OVERWRITTEN'}; the next read waited {waited_s:.2f} s",
        ),
        Finding(
            "event order, control",
            not control,
            "without the event the copy is overtaken, as it must be"
            if not control
            else "the copy was not overtaken: it is not asynchronous, or the kernel was too short",
        ),
    ]


@contextmanager
def two_shards(folder: Path) -> Iterator[SimpleNamespace]:
    """A swapper whose pool has one slot, and two parameters of that size on the drive."""
    from memascend.deepspeed.parameters.swapper import ParameterSwapper

    allocator = device_allocator()
    bounce = allocator.tensor(BOUNCE_BYTES, torch.uint8, component="bounce buffers")
    with TensorStore(volumes=[folder], bounce=bounce) as store:
        pool = Pool(memory=allocator, component="parameter slots")
        stream = ParameterStream(store=store, pool=pool)
        swapper = ParameterSwapper(
            attachment=SimpleNamespace(),  # only handed on, to the optimizer
            stream=stream,
            dtype=torch.float16,
        )
        params = [parameter(index) for index in range(2)]
        for value, param in enumerate(params, start=1):
            swapper.get_buffer(param, SHARD_NUMEL).fill_(value)
            swapper.swap_out_and_release([param])
        yield SimpleNamespace(swapper=swapper, params=params, pool=pool, stream=stream)


def parameter(index: int) -> SimpleNamespace:
    """As much of a ZeRO parameter as the swapper looks at."""
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    shard: Any = torch.empty(0, dtype=torch.float16)
    shard.ds_numel = SHARD_NUMEL
    shard.final_location = "nvme"
    shard.status = PartitionedParamStatus.NOT_AVAILABLE
    return SimpleNamespace(
        ds_id=index,
        dtype=torch.float16,
        ds_tensor=shard,
        ds_status=ZeroParamStatus.NOT_AVAILABLE,
        data=torch.empty(0, dtype=torch.float16),
    )


def overtake(shards: SimpleNamespace, *, with_event: bool) -> tuple[bool, float]:
    """Copies the first shard out slowly and reads the second; whether the first arrived whole.

    Also gives the seconds that the second read took.

    Raises:
        RuntimeError: The pool grew a second slot, so that nothing was tested.
    """
    first, second = shards.params
    swapper = shards.swapper
    swapper.swap_in([first], async_op=False)
    target = torch.zeros(SHARD_NUMEL, dtype=torch.float16, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLOW_CYCLES)
        target.copy_(first.ds_tensor.data, non_blocking=True)
        if with_event:
            swapper.after_gather([first])
        else:
            swapper.remove_partition_and_release_buffers([first])
    started_s = time.perf_counter()
    swapper.swap_in([second], async_op=False)
    waited_s = time.perf_counter() - started_s
    stream.synchronize()
    swapper.remove_partition_and_release_buffers([second])
    if shards.pool.held_bytes != page_up(2 * SHARD_NUMEL):
        held_bytes = shards.pool.held_bytes
        raise RuntimeError(f"the pool holds {held_bytes} bytes, the check needs exactly one slot")
    return bool((target == 1).all()), waited_s


# -- bandwidth -----------------------------------------------------------------------------------


def check_bandwidth(folder: Path) -> list[Finding]:
    """Host-to-device copies from a lease against pageable and torch's pinned memory.

    The three run in turns and ratios are taken within a round, so that a busy machine slows all.
    """
    pool = Pool(memory=device_allocator(), component="parameter slots")
    pool.grow(BANDWIDTH_BYTES)
    lease = pool.acquire(BANDWIDTH_BYTES)
    assert lease is not None
    sources = {
        "lease": lease.view(BANDWIDTH_BYTES, torch.uint8).zero_(),
        "torch pinned": torch.zeros(BANDWIDTH_BYTES, dtype=torch.uint8).pin_memory(),
        "pageable": torch.zeros(BANDWIDTH_BYTES, dtype=torch.uint8),
    }
    target = torch.empty(BANDWIDTH_BYTES, dtype=torch.uint8, device="cuda")
    seconds: dict[str, list[float]] = {name: [] for name in sources}
    names = list(sources)
    for index in range(1 + BANDWIDTH_ROUNDS):  # the first round warms up
        first = index % len(names)
        for name in (*names[first:], *names[:first]):
            taken_s = copy_seconds(target, sources[name])
            if index > 0:
                seconds[name].append(taken_s)
    rate = {name: BANDWIDTH_BYTES / statistics.median(taken) for name, taken in seconds.items()}
    findings = []
    for name, ratio_min in (("torch pinned", LEASE_TO_PINNED_MIN), ("pageable", 0.0)):
        pairs = zip(seconds[name], seconds["lease"], strict=True)
        ratios = [their_s / our_s for their_s, our_s in pairs]
        ratio = statistics.median(ratios)
        found = (
            f"{ratio:.2f}x (rounds from {min(ratios):.2f} to {max(ratios):.2f}); lease "
            f"{format_nbytes(rate['lease'])}/s, {name} {format_nbytes(rate[name])}/s"
        )
        findings.append(Finding(f"H2D, lease to {name}", ratio >= ratio_min, found))
    lease.release()
    return findings


def copy_seconds(target: torch.Tensor, source: torch.Tensor) -> float:
    """Wall time of one whole copy."""
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - started_s


# -- command line --------------------------------------------------------------------------------

CHECKS: dict[str, Callable[[Path], list[Finding]]] = {
    "pinned": check_pinned,
    "event-order": check_event_order,
    "bandwidth": check_bandwidth,
    "parity": check_parity,
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the checks, prints them, and gives the exit status."""
    parser = argparse.ArgumentParser(description="Check memascend on a CUDA device.")
    parser.add_argument(
        "--nvme-path", type=Path, default=Path(), help="folder on the drive (default: .)"
    )
    parser.add_argument("--only", choices=list(CHECKS), action="append", help="may be repeated")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was checked", file=sys.stderr)
        return STATUS_SKIPPED
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory(dir=options.nvme_path, prefix="gpu-smoke-") as folder:
        for name, check in CHECKS.items():
            if options.only is None or name in options.only:
                try:
                    findings += check(Path(folder))
                except Exception as error:  # the others still say something
                    findings.append(Finding(name, False, f"{type(error).__name__}: {error}"))
    table = Table(title=f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for title in ("check", "result", "found"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        table.add_row(finding.check, "ok" if finding.passed else "FAILED", Text(finding.found))
    Console().print(table)
    return 0 if all(finding.passed for finding in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
