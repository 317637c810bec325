"""How many bytes do the pinned allocations of a public model really take?

Our allocator is really run on the recorded list (pinned_shapes.py), scaled down by a power of two
so that it fits a small machine: torch's rounding scales with it exactly, while our rounding to
whole pages weighs that much more, to our disadvantage. Torch's pinned allocator rounds up to a
power of two (PowerOf2Ceil in ATen/core/CachingHostAllocator.h); that is arithmetic, not run. It is
counted twice: as DeepSpeed 0.19.8 uses it, A, C and D exact and the rest rounded; and with all
rounded, as when every pinned buffer came from torch.
"""

from __future__ import annotations

import argparse

import harness
import pinned_shapes

from memascend import _core

QUESTION = "pinned memory: bytes reserved for the allocations of a model"
SCALE = {"small": 4096, "large": 64}


def power_of_two_ceil(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length()


def run(*, small: bool) -> list[harness.Row]:
    """Return three rows for each model: ours, stock 0.19.8, and all rounded."""
    scale = SCALE["small" if small else "large"]
    return [row for name in pinned_shapes.MODELS for row in _run_model(name, scale)]


def _run_model(name: str, scale: int) -> list[harness.Row]:
    asked: list[int] = []
    stock_bytes = 0
    rounded_bytes = 0
    for allocation in pinned_shapes.load(name)["allocations"]:
        nbytes = -(-allocation["nbytes"] // scale)
        asked += [nbytes] * allocation["count"]
        rounded = allocation["count"] * power_of_two_ceil(nbytes)
        rounded_bytes += rounded
        stock_bytes += rounded if allocation["torch"] else allocation["count"] * nbytes
    config = {"scale": scale, "settings": pinned_shapes.SETTINGS, "count": len(asked)}
    circumstances = harness.machine()
    reserved = {
        "memascend": _reserved_bytes(asked),
        "stock 0.19.8": stock_bytes,
        "all rounded": rounded_bytes,
    }
    rows = []
    for contender, reserved_bytes in reserved.items():
        figures = {
            "asked_bytes": sum(asked),
            "reserved_bytes": reserved_bytes,
            "overhead_percent": 100.0 * (reserved_bytes / sum(asked) - 1.0),
            "full_size_gb": reserved_bytes * scale / 1e9,
        }
        rows.append(harness.Row("allocator", name, contender, figures, config, circumstances))
    return rows


def _reserved_bytes(asked: list[int]) -> int:
    """Run our allocator on the list, all blocks alive together; return the bytes it holds."""
    allocator = _core.Allocator(huge_pages="auto", lock=False, register_device=False)
    blocks = [allocator.allocate(nbytes=nbytes, component="bench") for nbytes in asked]
    reserved_bytes = allocator.stats().reserved_bytes
    del blocks
    return reserved_bytes


def run_and_report(options: argparse.Namespace) -> None:
    rows = run(small=options.small)
    harness.report("allocator", QUESTION, rows, options.out)


if __name__ == "__main__":
    run_and_report(harness.parser(QUESTION).parse_args())
