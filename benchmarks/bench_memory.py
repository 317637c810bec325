"""How much host memory does training take as the model grows, with stock and with memascend?

The same Llama at growing depth takes a few bf16 steps, each run in a process of its own. Counted is
the peak of the resident memory, from zero.Init to the last step, above what the process held once
it had imported everything and joined its group. Stock gets the fewest and smallest buffers it runs
with, and a malloc that gives back what is freed, which memascend sees to by itself. On the CPU the
device's memory is host memory as well; what would lie on a device is counted apart
(`device_bytes.py`), is the same for both, and is part of both peaks.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
from trainee import MALLOC_MMAP_THRESHOLD_BYTES, Model, Trainee, deepspeed_config, model_of

from memascend.base.units import MIB

QUESTION = "Memory: peak of a training run as the model grows"
SIZES = {
    "small": [20_000_000, 40_000_000],
    "large": [40_000_000, 80_000_000, 160_000_000, 320_000_000, 640_000_000],
}
#: The pair that differs in its vocabulary alone: this size, and the same depth with as many times
#: the rows in its embedding.
VOCABULARY_FACTOR = 8
STEPS = 2
#: What memascend may take of host memory: less than stock's smallest buffers, gradients aside.
BLOCK = {
    "host_memory_limit": "64MiB",
    # Left to the limit, tiles shrink to what keeps the drive busy with tiny requests.
    "streaming": {"optimizer": {"tile_bytes": "1MiB"}},
}
STOCK, OURS, HEAP_LEFT = "stock", "memascend", "memascend, heap left alone"
#: Each with its memascend block.
CONTENDERS: dict[str, dict[str, Any] | None] = {
    STOCK: None,
    OURS: BLOCK,
    HEAP_LEFT: BLOCK | {"heap": {"enabled": False}},
}
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": str(MALLOC_MMAP_THRESHOLD_BYTES)}


def training_config(model: Model, directory: Path) -> dict[str, Any]:
    """The same for both: as little on the device as DeepSpeed can do with, and few buffers."""
    return deepspeed_config(
        directory=directory,
        zero={
            # Every sub-group is closed by the first tensor: the largest is the largest tensor.
            "sub_group_size": 1,
            "reduce_bucket_size": 1 << 19,
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
        },
        # With three, transformers cannot initialize a layer.
        parameters={"buffer_count": 4, "buffer_size": model.largest_numel},
        optimizer={"buffer_count": 4},
    )


def run(*, small: bool, directory: Path) -> Iterator[harness.Row]:
    """Trains every size with all of them, then gives the slopes over the sizes."""
    size = "small" if small else "large"
    models = {label(numel): model_of(numel) for numel in SIZES[size]}
    first = model_of(SIZES[size][0])
    wide = Model(first.layers, VOCABULARY_FACTOR * first.vocabulary)
    models[f"{next(iter(models))}, vocabulary x{VOCABULARY_FACTOR}"] = wide
    measured: dict[str, list[tuple[int, int]]] = {contender: [] for contender in CONTENDERS}
    for case, model in models.items():
        peaks: dict[str, int] = {}
        for contender in CONTENDERS:
            row = train(case, contender, model, directory, STEPS)
            peaks[contender] = row.figures["peak_mb"]
            if contender != STOCK:
                row.figures["of_stock"] = peaks[contender] / peaks[STOCK]
            if model is not wide:
                measured[contender].append((model.numel, round(row.figures["peak_mb"] * 1e6)))
            yield row
    for contender, points in measured.items():
        figures = {"bytes_per_parameter": slope(points)}
        config = {"points": points}
        yield harness.Row("memory", "slope", contender, figures, config, harness.machine(directory))


def train(case: str, contender: str, model: Model, directory: Path, steps: int) -> harness.Row:
    """One run and its figures."""
    config = training_config(model, directory)
    run = Trainee(
        contender,
        config,
        model,
        directory,
        block=CONTENDERS[contender],
        counts_device_bytes=True,
        environment=GIVES_BACK if contender == STOCK else {},
    )
    with run:
        taken = [run.step() for _ in range(steps)]
        baseline_bytes = run.events["baseline"]["rss_bytes"]
    peaks = {
        "building": run.events["built"]["peak_bytes"],
        "initializing": run.events["initialized"]["peak_bytes"],
        "first step": taken[0]["peak_bytes"],
        "later steps": max(step["peak_bytes"] for step in taken[1:]),
    }
    above = {phase: (peak - baseline_bytes) / 1e6 for phase, peak in peaks.items()}
    own = taken[-1]["components"] or {}
    figures: dict[str, Any] = {
        "parameters_m": run.events["initialized"]["parameters"] / 1e6,
        "peak_mb": max(above.values()),
        "own_mb": own["all, held"] / 1e6 if own else None,
        "faults": taken[-1]["training"]["minor_faults"],
        "device_mb": max(step["device_bytes"]["all at once"] for step in taken) / 1e6,
    }
    config |= {
        "above_baseline_mb": above,
        "baseline_mb": baseline_bytes / 1e6,
        "own_bytes": own,
        "device_bytes": taken[-1]["device_bytes"],
        "losses": [step["loss"] for step in taken],
    }
    return harness.Row("memory", case, contender, figures, config, harness.machine(directory))


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the line through (x, y) points that lies nearest by least squares.

    Raises:
        ValueError: There are not two different x.
    """
    count = len(points)
    mean_x = sum(x for x, _ in points) / max(1, count)
    mean_y = sum(y for _, y in points) / max(1, count)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if spread == 0:
        raise ValueError(f"a slope needs two different sizes, got {points}")
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


def label(numel: int) -> str:
    return f"{round(numel / 1e6)}M"


def components(rows: Sequence[harness.Row]) -> list[harness.Row]:
    """A row for each component of memascend's own memory, with a figure for each case."""
    ours = [row for row in rows if row.contender == OURS and row.config.get("own_bytes")]
    names = list(dict.fromkeys(name for row in ours for name in row.config["own_bytes"]))
    return [
        harness.Row(
            "memory",
            "MiB",
            name,
            {row.case: row.config["own_bytes"].get(name, 0) / MIB for row in ours},
        )
        for name in names
    ]


def run_and_report(options: argparse.Namespace) -> None:
    """What the command line asks for."""
    rows = harness.collect(run(small=options.small, directory=options.directory))
    harness.report("memory", QUESTION, rows, options.out)
    harness.report("memory_components", "memascend's own bytes", components(rows), None)


if __name__ == "__main__":
    run_and_report(harness.parser(QUESTION).parse_args())
