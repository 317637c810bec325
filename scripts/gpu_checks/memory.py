"""Host memory and the device: refusals of the driver, bandwidth, and the kernel for overflow.

A sandbox may register no host memory at all. Checks about registered memory are not here then.
"""

from __future__ import annotations

import ctypes
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_lacks
import torch
from cases import Lack

from memascend.base.units import MIB
from memascend.memory.allocator import HostAllocator
from memascend.memory.pool import Pool

from . import Check, Figures

ALREADY_REGISTERED = 712
NOT_REGISTERED = 713
PIECE_BYTES = 8 * MIB
BANDWIDTH_BYTES = 256 * MIB
BANDWIDTH_ROUNDS = 9
#: A lease is page-locked memory like torch's own; less than this of its speed is a fault.
LEASE_TO_PINNED_MIN = 0.9


# -- refusals of the driver ----------------------------------------------------------------------


def measure_refusals(folder: Path, broken: bool) -> dict[str, Any]:
    """Has the real driver refuse three times; what is told, and whether the memory still serves."""
    if broken:
        torch.zeros(1, device="cuda")  # makes the context that the first refusal is about
    early = HostAllocator(register_device=True, huge_pages="transparent")
    first = early.tensor(PIECE_BYTES, torch.uint8, component="smoke")
    figures = {
        "without a context": {
            "registered_bytes": early.core.report().registered_bytes,
            "notes": list(early.core.notes()),
            "intact": _goes_round(first),
        }
    }
    require_registration()
    driver = ctypes.CDLL("libcuda.so.1")
    late = HostAllocator(register_device=True, huge_pages="transparent")
    second = late.tensor(PIECE_BYTES, torch.uint8, component="smoke")
    address = ctypes.c_void_p(second.data_ptr())
    if broken:
        plain = torch.zeros(PIECE_BYTES, dtype=torch.uint8)
        again = ctypes.c_void_p(plain.data_ptr())
    else:
        again = address
    figures["registered twice"] = {
        "code": driver.cuMemHostRegister_v2(again, ctypes.c_size_t(PIECE_BYTES), 1),
        "intact": _goes_round(second),
    }
    # Behind the arena's back: then it cannot take the registration back itself.
    code = 0 if broken else driver.cuMemHostUnregister(address)
    del second
    late.core.trim()
    figures["taken back twice"] = {
        "code": code,
        "held_bytes": late.core.stats().reserved_bytes,
        "notes": list(late.core.notes()),
    }
    return figures


def judge_refusals(figures: Figures) -> list[str]:
    """Compares each refusal with what has to become of it."""
    early, twice, back = (
        figures[name] for name in ("without a context", "registered twice", "taken back twice")
    )
    problems = []
    if early["registered_bytes"] or not early["notes"]:
        problems.append(f"without a context nothing is registered, and a note says so: {early}")
    if twice["code"] != ALREADY_REGISTERED:
        problems.append(f"the driver knows what the arena has registered: {twice}")
    if back["code"] or not back["held_bytes"] or not _any_number(back["notes"], NOT_REGISTERED):
        problems.append(f"memory that cannot be unregistered stays, and a note says so: {back}")
    if not (early["intact"] and twice["intact"]):
        problems.append("memory that was refused went to the device and came back otherwise")
    return problems


def require_registration() -> None:
    """Register plain memory with the driver, and take it back.

    Raises:
        Lack: The driver refuses memory that nothing is wrong with.
    """
    torch.zeros(1, device="cuda")
    driver = ctypes.CDLL("libcuda.so.1")
    plain = torch.zeros(PIECE_BYTES, dtype=torch.uint8)
    address = ctypes.c_void_p(plain.data_ptr())
    if code := driver.cuMemHostRegister_v2(address, ctypes.c_size_t(PIECE_BYTES), 1):
        raise Lack(f"the driver registers no host memory here: CUDA error {code}")
    driver.cuMemHostUnregister(address)


def _any_number(notes: list[str], code: int) -> bool:
    return any(f"error {code}" in note for note in notes)


def _goes_round(tensor: torch.Tensor) -> bool:
    """Whether bytes are the same after a way to the device and back."""
    expected = torch.arange(tensor.numel(), dtype=torch.int64).to(torch.uint8)
    tensor.copy_(expected)
    there = tensor.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    tensor.zero_()
    tensor.copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    return bool((tensor == expected).all())


# -- bandwidth -----------------------------------------------------------------------------------


def measure_bandwidth(folder: Path, broken: bool) -> dict[str, Any]:
    """Copies of leases and of torch's pinned memory, in turns: GB/s, and ratios within a round.

    Ratios are taken within a round, so that a busy machine slows both.
    """
    require_registration()
    allocator = HostAllocator(register_device=not broken, lock=not broken)
    leases = [_lease(allocator) for _ in range(2)]
    pinned = [torch.zeros(BANDWIDTH_BYTES, dtype=torch.uint8).pin_memory() for _ in range(2)]
    devices = [torch.zeros(BANDWIDTH_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
    figures = {}
    for direction in ("to the device", "from the device", "both at once"):
        seconds: dict[str, list[float]] = {"lease": [], "pinned": []}
        for index in range(1 + BANDWIDTH_ROUNDS):  # the first round warms up
            turns = [("lease", leases), ("pinned", pinned)]
            for name, hosts in turns if index % 2 else reversed(turns):
                taken_s = _seconds(functools.partial(_copy, direction, hosts, devices))
                if index > 0:
                    seconds[name].append(taken_s)
        pairs = zip(seconds["pinned"], seconds["lease"], strict=True)
        ways = 2 if direction == "both at once" else 1
        figures[direction] = {
            "ratio": statistics.median(their_s / our_s for their_s, our_s in pairs),
            **{
                f"{name}_gb_s": ways * BANDWIDTH_BYTES / statistics.median(taken) / 1e9
                for name, taken in seconds.items()
            },
        }
    return figures


def judge_bandwidth(figures: Figures) -> list[str]:
    """Wants every direction to be fast."""
    return [
        f"{direction}: leases reach {found['ratio']:.2f} of pinned memory's speed, "
        f"less than {LEASE_TO_PINNED_MIN}"
        for direction, found in figures.items()
        if found["ratio"] < LEASE_TO_PINNED_MIN
    ]


def _lease(allocator: HostAllocator) -> torch.Tensor:
    pool = Pool(memory=allocator, component="smoke", budget_bytes=4 * BANDWIDTH_BYTES)
    pool.resize(BANDWIDTH_BYTES, slot_bytes_max=BANDWIDTH_BYTES)
    lease = pool.acquire(BANDWIDTH_BYTES)
    assert lease is not None
    return lease.view(BANDWIDTH_BYTES, torch.uint8).zero_()


def _copy(direction: str, hosts: list[torch.Tensor], devices: list[torch.Tensor]) -> None:
    if direction != "from the device":
        with torch.cuda.stream(_stream(0)):
            devices[0].copy_(hosts[0], non_blocking=True)
    if direction != "to the device":
        with torch.cuda.stream(_stream(1)):
            hosts[1].copy_(devices[1], non_blocking=True)


@functools.cache
def _stream(number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream()


def _seconds(run: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - started_s


# -- the kernel for overflow ---------------------------------------------------------------------


def measure_kernels(
    folder: Path,
    broken: bool,
    *,
    device: str = "cuda",
    sizes: tuple[int, ...] = (1, 1000, 4096, 3_000_017),
) -> dict[str, Any]:
    """Values planted in tensors, and sums of squares, by the Triton kernel and on the host."""
    from memascend.kernels import overflow, overflow_triton

    if device == "cuda":
        overflow_triton.try_on(device)  # else training does without the kernel, and so would this
    scanned, wrong = 0, []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for numel in sizes:
            clean = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
            ours = overflow_triton.scan(clean.to(device), sum_squares=True)
            theirs = overflow.scan(clean, sum_squares=True)
            scanned += 1
            if ours.non_finite or abs(ours.sum_squares / theirs.sum_squares - 1) > 1e-12:
                wrong.append(f"{dtype} x {numel}: {ours} and on the host {theirs}")
            for place in sorted({0, numel // 2, numel - 1}):
                for value in (float("inf"), float("-inf"), float("nan")):
                    planted = clean.to(device)
                    if not broken:
                        planted[place] = value
                    scanned += 1
                    if not overflow_triton.scan(planted).non_finite:
                        wrong.append(f"{dtype} x {numel}: {value} at {place} was not seen")
    return {"scanned": scanned, "wrong": wrong}


def judge_kernels(figures: Figures) -> list[str]:
    """Wants nothing wrong in something."""
    return [*figures["wrong"]] if figures["scanned"] else ["nothing was scanned"]


CHECKS = (
    Check(
        "refusals",
        "what the driver refuses is noted, and the memory serves without",
        measure_refusals,
        judge_refusals,
        "nothing is refused",
        noticed_min=3,
    ),
    Check(
        "bandwidth",
        "leases are copied as fast as torch's pinned memory, both ways and at once",
        measure_bandwidth,
        judge_bandwidth,
        "leases of pageable memory",
        noticed_min=3,
    ),
    Check(
        "kernels",
        "the Triton kernel sees inf and nan anywhere, and its sums are the host's",
        measure_kernels,
        judge_kernels,
        "inf and nan are not there",
        needs=gpu_lacks.compiler,  # Triton compiles what launches a kernel
        seconds=30.0,
    ),
)
