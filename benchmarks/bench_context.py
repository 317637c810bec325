"""Does host memory grow with the tokens of a step, and what does it cost that it does not?

A model with gradient checkpointing takes steps of more and more tokens: with its checkpoints on the
device, and with the section `activations`. Its layers keep a hidden state as wide as that of an 8B
model, with --emulated half as wide, and compute for a stated time without any CPU
(`sleeping_model.py`): as long, beside what this drive needs for a checkpoint, as such a layer takes
on a GPU beside a drive of those speeds (the constants below). All runs are alive side by side and
take turns.

Counted is the peak of the resident memory in a step, above what the process held before its model
was made. On the CPU the device's memory is host memory as well, and nothing else can train:
transformers' `offload` asks for page-locked memory, which needs a device, and DeepSpeed's
`cpu_checkpointing` frees the very tensor that it keeps.

With --emulated all train on the emulated device of the tests, these two as well. The layers'
compute is a kernel of it, and copies run on streams. The device's memory is not counted there: it
lies in the process, is resident as soon as it is used for the first time, and is never given back:
the device takes what it had by then off each peak that the kernel counts, and begins a new one
whenever it grows. What the device held at most is a figure of its own.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import harness
from bench_memory import slope
from bench_step import training_config
from trainee import Sleeping, Trainee, side_by_side
from transfers import Transfers

QUESTION = "Context: peak memory and time of a step as its tokens grow"
HELD, OURS = "checkpoints on the device", "activations on the drive"
OFFLOAD, CPU_CHECKPOINTING = "transformers' offload", "DeepSpeed's cpu_checkpointing"


@dataclass(frozen=True, slots=True)
class Contender:
    """A place for checkpoints.

    Attributes:
        checkpointing: The program's option.
        config: Further keys of DeepSpeed's JSON.
        block: The memascend block.
    """

    checkpointing: str
    config: Mapping[str, Any] = field(default_factory=dict)
    block: Mapping[str, Any] = field(default_factory=dict)


CONTENDERS = {
    HELD: Contender("device"),
    OFFLOAD: Contender("host"),
    CPU_CHECKPOINTING: Contender(
        "deepspeed", config={"activation_checkpointing": {"cpu_checkpointing": True}}
    ),
    OURS: Contender("device", block={"activations": {"enabled": True}}),
}
#: Which of them can train on what.
TRAINING: dict[str, Sequence[str]] = {"cpu": (HELD, OURS), "sim": tuple(CONTENDERS)}
#: Tokens of a step.
TOKENS = {"small": (1024, 4096), "large": (1024, 2048, 4096, 8192, 16384)}
#: Layers, and the width of the hidden state; the emulated device lies in host memory, and twice as
#: many are alive on it.
SIZES = {
    "cpu": {"small": (24, 1024), "large": (32, 4096)},
    "sim": {"small": (24, 1024), "large": (32, 2048)},
}
ROWS = 256  # of a layer's matrix: large enough for the drive, small beside checkpoints
ITEMSIZE = 2
#: Of what forward saves, the part whose growth in host memory shows that it is kept there.
HOLDS_MIN = 0.5
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
    accelerator = "sim" if options.emulated else "cpu"
    idle = wide(*SIZES[accelerator][size])
    write_s, read_s = time_drive(idle, max(TOKENS[size]), options.directory)
    trained = []
    for tokens in TOKENS[size]:
        model = computing(idle, tokens / max(TOKENS[size]), write_s=write_s, read_s=read_s)
        taken = take_steps(model, tokens, options.directory, ROUNDS[size], accelerator)
        for row in rows_of(model, tokens, taken):
            row.config |= {
                "accelerator": accelerator,
                "drive_s": {"write": write_s, "read": read_s},
            }
            row.machine = harness.machine(options.directory)
            trained.append(row)
            yield row
    yield from slopes_of(trained, checkpoint_bytes(idle, 1))


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
    model: Sleeping, tokens: int, directory: Path, rounds: int, accelerator: str
) -> dict[str, list[dict[str, Any]]]:
    """The steps of each but the first ones; they start in rotating order."""
    runs = [
        Trainee(
            name,
            training_config(model, {}, directory) | CONTENDERS[name].config,
            model,
            directory,
            block=CONTENDERS[name].block,
            tokens=tokens,
            options=["--checkpointing", CONTENDERS[name].checkpointing],
            accelerator=accelerator,
        )
        for name in TRAINING[accelerator]
    ]
    taken: dict[str, list[dict[str, Any]]] = {one.name: [] for one in runs}
    with side_by_side(runs):
        for index in range(WARMUPS + rounds):
            for one in harness.in_turn(runs, index):
                step = one.step()
                step["above_imports_bytes"] = (
                    step["peak_bytes"] - one.events["baseline"]["rss_bytes"]
                )
                if index >= WARMUPS:
                    taken[one.name].append(step)
    return taken


def rows_of(
    model: Sleeping, tokens: int, taken: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Iterator[harness.Row]:
    """A row for each.

    MB at the peak: of the host, of what of it is memascend's, of the device, and of the latter in
    tensors that are still there; seconds of a step, and of memascend's by them.
    """
    losses = {tuple(step["loss"] for step in steps) for steps in taken.values()}
    for name, steps in taken.items():
        figures: dict[str, Any] = {
            "host_mb": max(step["above_imports_bytes"] for step in steps) / 1e6,
            "own_mb": steps[-1]["components"]["all, held"] / 1e6,
        }
        if steps[-1]["on_device"]:
            for figure, key in (("device_mb", "active"), ("tensors_mb", "allocated")):
                peaks = [step["on_device"][f"{key}_bytes"] for step in steps]
                figures[figure] = max(peaks) / 1e6
        else:  # of what is on the device, this is known
            saved_bytes = steps[-1]["saved_bytes_peak"] or checkpoint_bytes(model, tokens)
            figures["saved_mb"] = saved_bytes / 1e6
        figures["step_s"] = harness.spread([step["training"]["wall_s"] for step in steps])
        figures["ours_to_it"] = harness.spread(
            [
                our["training"]["wall_s"] / their["training"]["wall_s"]
                for our, their in zip(taken[OURS], steps, strict=True)
            ]
        )
        config = {
            "model": model.shape,
            "tokens": tokens,
            "checkpoint_bytes": checkpoint_bytes(model, tokens),
            "losses_equal": len(losses) == 1,
        }
        yield harness.Row("context", f"{tokens} tokens", name, figures, config)


def slopes_of(rows: Sequence[harness.Row], token_bytes: int) -> Iterator[harness.Row]:
    """Bytes for each token, of the host and of the device; as parts of what forward saves.

    Memascend's as a part of those who keep checkpoints in host memory.

    Args:
        rows: Of all numbers of tokens.
        token_bytes: What forward saves for each.
    """
    points: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        of_row = points.setdefault(row.contender, {})
        for figure in ("host_mb", "device_mb", "tensors_mb"):
            if figure in row.figures:
                point = row.config["tokens"], 1e6 * row.figures[figure]
                of_row.setdefault(figure, []).append(point)
    ours = slope(points[OURS]["host_mb"])
    for name, of_row in points.items():
        figures: dict[str, Any] = {}
        for figure, found in of_row.items():
            place = figure.removesuffix("_mb")
            figures[f"{place}_bytes_per_token"] = slope(found)
            figures[f"{place}_of_checkpoints"] = slope(found) / token_bytes
        if figures["host_of_checkpoints"] > HOLDS_MIN:
            figures["ours_to_it"] = ours / figures["host_bytes_per_token"]
        yield harness.Row("context", "slope", name, figures, {"points": of_row})


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(QUESTION)
    parser.add_argument(
        "--emulated",
        action="store_true",
        help="on the emulated device, beside those who keep checkpoints in host memory",
    )
    return parser.parse_args()


def main() -> None:
    options = arguments()
    rows = harness.collect(run(options))
    steps = [row for row in rows if row.case != "slope"]
    harness.report("context", QUESTION, steps, None)
    harness.report("context", f"{QUESTION}: slopes", rows[len(steps) :], None)
    harness.write("context", rows, options.out)


if __name__ == "__main__":
    main()
