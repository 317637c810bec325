"""Does host memory grow with the tokens of a step, and what does it cost that it does not?

A model with gradient checkpointing takes steps of more and more tokens: once with its checkpoints
on the device, and once with the section `activations`. Its layers keep a hidden state as wide as
that of an 8B model, and compute for a stated time without any CPU (`sleeping_model.py`): as long,
beside what this drive needs for a checkpoint, as such a layer takes on a GPU beside a drive of
those speeds (the constants below). Both runs are alive side by side and take turns.

Counted is the peak of the resident memory in a step, above what the process held before its model
was made. On the CPU the device's memory is host memory as well, so checkpoints on the device stand
for those in host memory too: transformers' `offload` and DeepSpeed's `cpu_checkpointing` keep the
same bytes there, and the former rounds each tensor up to a power of two.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
from bench_memory import slope
from bench_overlap import Sleeping
from bench_step import training_config
from trainee import Trainee
from transfers import Transfers

QUESTION = "Context: peak memory and time of a step as its tokens grow"
HELD, OURS = "checkpoints in memory", "activations on the drive"
BLOCKS: dict[str, dict[str, Any]] = {HELD: {}, OURS: {"activations": {"enabled": True}}}
#: Tokens of a step.
TOKENS = {"small": (1024, 4096), "large": (1024, 2048, 4096, 8192, 16384)}
#: Layers, and the width of the hidden state.
SIZES = {"small": (24, 1024), "large": (32, 4096)}
ROWS = 256  # of a layer's matrix: large enough for the drive, small beside checkpoints
ITEMSIZE = 2
ROUNDS = {"small": 1, "large": 3}
WARMUPS = 1
#: Elements that the drive is timed with, and how often; the middle one counts.
TIMED_NUMEL, DRIVE_ROUNDS = 64 << 20, 3

# An 8B model's layer at 16k tokens: two operations for each parameter, and causal attention.
LAYER_NUMEL, LAYER_HIDDEN, LAYER_TOKENS = 218_000_000, 4096, 16384
TOKEN_FLOP = 2 * LAYER_NUMEL + 2 * LAYER_TOKENS * LAYER_HIDDEN
GPU_FLOPS = 200e12
#: As `memascend plan` takes them by default.
DRIVE_WRITE_BYTES_S, DRIVE_READ_BYTES_S = 3e9, 5e9
FORWARD_S_PER_BYTE = TOKEN_FLOP / GPU_FLOPS / (ITEMSIZE * LAYER_HIDDEN)
#: Compute of a layer beside the drive's time for its checkpoint: in forward, and in backward, which
#: takes twice as long, after it was computed again.
FORWARD_TO_WRITE = FORWARD_S_PER_BYTE * DRIVE_WRITE_BYTES_S
BACKWARD_TO_READ = 2 * FORWARD_S_PER_BYTE * DRIVE_READ_BYTES_S


def wide(layers: int, width: int) -> Sleeping:
    """A model of small matrices whose hidden state is as wide as they are."""
    return Sleeping(layers, width, rows=ROWS, hidden=width)


def checkpoint_bytes(model: Sleeping, tokens: int) -> int:
    """What all layers together save."""
    return model.layers * model.hidden * ITEMSIZE * tokens


def run(options: argparse.Namespace) -> Iterator[harness.Row]:
    """Trains with every number of tokens, then gives the slopes over them."""
    size = "small" if options.small else "large"
    idle = wide(*SIZES[size])
    write_s, read_s = time_drive(idle, max(TOKENS[size]), options.directory)
    peaks: dict[str, list[tuple[float, float]]] = {name: [] for name in BLOCKS}
    for tokens in TOKENS[size]:
        model = computing(idle, tokens / max(TOKENS[size]), write_s=write_s, read_s=read_s)
        taken = take_steps(model, tokens, options.directory, ROUNDS[size])
        for row in rows_of(model, tokens, taken):
            peaks[row.contender].append((tokens, 1e6 * row.figures["peak_mb"]))
            row.config |= {"drive_s": {"write": write_s, "read": read_s}}
            row.machine = harness.machine(options.directory)
            yield row
    for name, points in peaks.items():
        figures = {"bytes_per_token": slope(points)}
        figures["of_checkpoints"] = figures["bytes_per_token"] / checkpoint_bytes(idle, 1)
        yield harness.Row("context", "slope", name, figures, {"points": points})


def time_drive(model: Sleeping, tokens: int, directory: Path) -> tuple[float, float]:
    """Seconds that the drive needs to write the checkpoints of all layers, and to read them."""
    moved = {"parameter": ITEMSIZE}
    multiple = checkpoint_bytes(model, tokens) / (ITEMSIZE * TIMED_NUMEL)
    times = []
    with Transfers(TIMED_NUMEL, directory) as transfers:
        for read, written in (({}, moved), (moved, {})):
            move = functools.partial(transfers.run, read, written)
            samples = [harness.measure(move).wall_s for _ in range(DRIVE_ROUNDS)]
            times.append(multiple * harness.spread(samples).p50)
    return times[0], times[1]


def computing(idle: Sleeping, share: float, *, write_s: float, read_s: float) -> Sleeping:
    """The model whose layers compute as long as stated, with a share of the tokens."""
    return replace(
        idle,
        forward_s=FORWARD_TO_WRITE * share * write_s / idle.layers,
        backward_s=BACKWARD_TO_READ * share * read_s / idle.layers,
    )


def take_steps(
    model: Sleeping, tokens: int, directory: Path, rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """The steps of both but the first ones; they start in rotating order."""
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in BLOCKS}
    with ExitStack() as stack:
        runs = []
        for name, block in BLOCKS.items():
            config = training_config(model, {}, directory)
            run = Trainee(
                name,
                config,
                model,
                directory,
                block=block,
                tokens=tokens,
                options=["--checkpointing", "device"],
            )
            runs.append(stack.enter_context(run))
        for index in range(WARMUPS + rounds):
            for one in harness.in_turn(runs, index):
                step = one.step()
                step["baseline_bytes"] = one.events["baseline"]["rss_bytes"]
                if index >= WARMUPS:
                    taken[one.name].append(step)
    return taken


def rows_of(
    model: Sleeping, tokens: int, taken: dict[str, list[dict[str, Any]]]
) -> Iterator[harness.Row]:
    """A row for each: MB at the peak, of ours, of what forward saved; seconds of a step.

    The last two beside the run whose checkpoints are held.
    """
    losses = {tuple(step["loss"] for step in steps) for steps in taken.values()}
    for name, steps in taken.items():
        own = steps[-1]["components"]
        figures = {
            "peak_mb": peak_bytes(steps) / 1e6,
            "of_held": peak_bytes(steps) / peak_bytes(taken[HELD]),
            "own_mb": own["all, held"] / 1e6,
            "saved_mb": (steps[-1]["saved_bytes_peak"] or checkpoint_bytes(model, tokens)) / 1e6,
            "step_s": harness.spread([step["training"]["wall_s"] for step in steps]),
            "time_to_held": harness.spread(
                [
                    our["training"]["wall_s"] / held["training"]["wall_s"]
                    for our, held in zip(steps, taken[HELD], strict=True)
                ]
            ),
        }
        config = {"model": model.shape, "losses_equal": len(losses) == 1}
        config["checkpoint_bytes"] = checkpoint_bytes(model, tokens)
        yield harness.Row("context", f"{tokens} tokens", name, figures, config)


def peak_bytes(steps: Sequence[dict[str, Any]]) -> int:
    """The highest of several steps, above the baseline."""
    return max(int(step["peak_bytes"] - step["baseline_bytes"]) for step in steps)


def main() -> None:
    options = harness.parser(QUESTION).parse_args()
    harness.report("context", QUESTION, harness.collect(run(options)), options.out)


if __name__ == "__main__":
    main()
