"""How much does each form of a step write, and how long does it take beside a slow drive?

One model, whose layers compute for a stated time (`sleeping_model.py`), is trained in all forms at
once, which take turns of a few steps: master weights whole or in halves, with clipping and without,
steps that begin during backward as a guess that is always right or always wrong, moments in bf16
or 8 bits, and stock. What a turn leaves to be done behind its last step is waited for, and counts.
Ratios are to whole master weights, within a round. Bytes are those of the drive, as the kernel
counts them, beside those of the plan; `off_plan` is the larger difference, 0.05 for 5 %.

With --drive-rate a control group holds the drive to a rate: a consumer SSD past its cache.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import harness
from bench_overlap import parser_of_model, take_turns
from bench_step import CONTENDERS, STOCK, Contender, trainee_of
from drive_rate import drive_rate
from trainee import TOKENS, Sleeping, Trainee

from memascend.config.block import parse_block
from memascend.config.deepspeed import parse_deepspeed
from memascend.plan.derive import PlanRequest, derive
from memascend.plan.second_values import wrong_guess_bytes
from memascend.plan.shapes import ModelShapes, TensorShape
from memascend.plan.stock import stock

QUESTION = "Forms of a step: bytes and seconds"
SIZES = {"small": (3, 1024), "large": (12, 4096)}  # layers, width
LAYER_MS = {"small": (1.0, 2.0), "large": (40.0, 80.0)}
ROUNDS = {"small": 1, "large": 5}
#: Far above every norm, and far below.
NEVER_CLIPS, ALWAYS_CLIPS = 1e9, 1e-9


@dataclass(frozen=True, slots=True)
class Form:
    """One form of a step.

    Attributes:
        optimizer: Keys of `streaming.optimizer`; None for stock.
        clipping: `gradient_clipping`.
        options: Of the training program.
    """

    optimizer: Mapping[str, Any] | None
    clipping: float = NEVER_CLIPS
    options: Sequence[str] = ()


WHOLE, WRONG = "whole master weights", "halves, wrong guesses"
_EARLY = {"during_backward": True}
_EIGHT = {"state_dtype": "int8", "master_dtype": "bf16+8"}
FORMS = {
    WHOLE: Form({"split_master": False}),
    "halves": Form({}),
    "halves, right guesses": Form(_EARLY),
    WRONG: Form(_EARLY, ALWAYS_CLIPS, ("--always-guess",)),
    "whole, no clipping, during backward": Form(_EARLY | {"split_master": False}, 0.0),
    "halves, no clipping, during backward": Form(_EARLY, 0.0),
    "halves, moments in bf16": Form({"state_dtype": "bf16"}),
    "halves, moments in 8 bits": Form({"state_dtype": "int8"}),
    "24-bit weights, moments in 8 bits": Form(_EIGHT),
    "24-bit weights, moments in 8 bits, right guesses": Form(_EARLY | _EIGHT),
    "24-bit weights, moments in 8 bits, no clipping, during backward": Form(_EARLY | _EIGHT, 0.0),
    STOCK: Form(None),
}


def run(options: argparse.Namespace) -> Iterator[harness.Row]:
    """Trains one model in all forms, in turns."""
    size = "small" if options.small else "large"
    forward_ms, backward_ms = options.layer_ms or LAYER_MS[size]
    layers, width = options.size or SIZES[size]
    model = Sleeping(layers, width, forward_s=forward_ms / 1e3, backward_s=backward_ms / 1e3)
    accelerator = "sim" if options.emulated else "cpu"
    runs = [
        trainee(name, form, model, options.directory, accelerator)
        for name, form in FORMS.items()
        if name == WHOLE or any(part in name for part in options.only)
    ]
    taken = take_turns(runs, options.rounds or ROUNDS[size])
    circumstances = harness.machine(options.directory) | {"drive_gb_per_s": options.drive_rate}
    config = {"model": model.shape, "accelerator": accelerator}
    for one in runs:
        found = figures(taken[one.name], taken[WHOLE], model.numel) | planned(one, model)
        found["off_plan"] = off_plan(found)
        yield harness.Row("forms", "a step", one.name, found, config, circumstances)


def trainee(name: str, form: Form, model: Sleeping, directory: Path, accelerator: str) -> Trainee:
    """The run of a form, which has not started."""
    contender = CONTENDERS[STOCK]
    if form.optimizer is not None:
        contender = Contender({}, block={"streaming": {"optimizer": dict(form.optimizer)}})
    found = trainee_of(
        name,
        contender,
        model,
        directory,
        tokens=TOKENS,
        clipping=form.clipping,
        accelerator=accelerator,
    )
    return replace(found, options=[*found.options, *form.options])


def figures(
    ours: Sequence[Mapping[str, Any]], whole: Sequence[Mapping[str, Any]], numel: int
) -> dict[str, Any]:
    """Seconds of a step and their ratio to whole master weights, and bytes of each parameter."""
    parts = [step["training"] for step in ours]
    pairs = zip(parts, (step["training"] for step in whole), strict=True)
    return {
        "step_s": harness.spread([part["wall_s"] for part in parts]),
        "to_whole": harness.spread([one["wall_s"] / other["wall_s"] for one, other in pairs]),
        **{
            f"{verb}_per_parameter": harness.spread(
                [part[f"{verb}_bytes"] / numel for part in parts]
            )
            for verb in ("read", "written")
        },
    }


def planned(run: Trainee, model: Sleeping) -> dict[str, float]:
    """Bytes of each parameter that the plan has a step read and write."""
    read, written, handed_over = planned_bytes(run, model)
    return {
        "planned_read": read / model.numel,
        # If forward waits all along for the step behind it.
        "planned_read_least": (read - handed_over) / model.numel,
        "planned_written": written / model.numel,
    }


def planned_bytes(run: Trainee, model: Sleeping) -> tuple[float, float, float]:
    """Bytes read and written, and of those read the ones that memory may give instead."""
    matrix = functools.partial(TensorShape, shape=(model.rows or model.width, model.width))
    names = (f"model.layers.{layer}.weight" for layer in range(model.layers))
    shapes = ModelShapes("sleeping", tuple(map(matrix, names)))
    request = PlanRequest.from_deepspeed(run.config, block=parse_block(dict(run.block or {})))
    request = replace(request, has_decay_groups=False)
    if run.block is None:
        plan: Any = stock(shapes, request=request, settings=parse_deepspeed(run.config))
    elif run.name == WRONG:
        after = derive(shapes, request=replace(request, during_backward=False))
        return *wrong_guess_bytes(shapes, after), after.handed_over_bytes
    else:
        plan = derive(shapes, request=request)
    handed_over = getattr(plan, "handed_over_bytes", 0)
    return sum(plan.read_bytes.values()), sum(plan.written_bytes.values()), handed_over


def off_plan(found: Mapping[str, Any]) -> float:
    """The larger difference of bytes that were counted from those of the plan, as a part of it."""
    read, written = found["read_per_parameter"].p50, found["written_per_parameter"].p50
    nearest = min(max(read, found["planned_read_least"]), found["planned_read"])
    return max(abs(read / nearest - 1), abs(written / found["planned_written"] - 1))


def main() -> None:
    parser = parser_of_model(QUESTION)
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="PART",
        help="of their names: forms beside whole master weights (default: all)",
    )
    options = parser.parse_args()
    with drive_rate(options.directory, options.drive_rate):
        rows = harness.collect(run(options))
    harness.report("forms", QUESTION, rows, options.out)


if __name__ == "__main__":
    main()
