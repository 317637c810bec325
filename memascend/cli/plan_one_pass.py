"""One pass per step in `memascend plan`: a table beside accumulation, its notes and its numbers.

The arithmetic is in memascend/plan/one_pass.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from typing import Any

from rich.markup import escape
from rich.table import Table

from memascend.base.units import format_nbytes, page_down
from memascend.cli.plan_time import drive_seconds, drive_time
from memascend.config.block import BLOCK_KEY
from memascend.plan.context import ContextPlan, Training
from memascend.plan.fit import Room
from memascend.plan.one_pass import Comparison, Step, fewest_slices, smaller_slices

#: Titles of a row and of columns.
ONE_PASS, ACCUMULATION = "memascend, one pass", "memascend, accumulation"
GB = 10**9


def context_of(comparison: Comparison) -> ContextPlan:
    """Return the memory of one pass under a title of its own, as one more way to train."""
    context = comparison.one_pass.context
    return dataclasses.replace(context, way=dataclasses.replace(context.way, title=ONE_PASS))


def slice_tokens_of(
    training: Training, *, batch: int | None = None, context: int | None = None
) -> Callable[[int], int]:
    """Return a function from the batch or context that is not given to the tokens of a slice.

    Without a stated number of slices each has one sequence.
    """

    def tokens_of(count: int) -> int:
        sequences, tokens = batch or count, context or count
        stated = training.stated_slices
        slices = sequences if stated is None else stated.slices_of(sequences)
        return -(-sequences // slices) * tokens

    return tokens_of


def largest_slice(training: Training, room: Room, *, batch: int, context: int) -> int:
    """Return the most sequences of a slice that fit, 0 if not even one does."""
    slices = fewest_slices(training, room, batch=batch, context=context)
    return 0 if slices is None else -(-batch // slices)


def comparison_table(training: Training, comparison: Comparison, args: argparse.Namespace) -> Table:
    """Return accumulation and one pass side by side."""
    one_pass, accumulation = comparison.one_pass, comparison.accumulation
    table = Table(
        title=f"{escape(training.shapes.name)}: a step of {one_pass.tokens // args.context} "
        f"sequences of {args.context} tokens, on one rank"
    )
    table.add_column("")
    for title in (ACCUMULATION, ONE_PASS):
        table.add_column(title, justify="right")
    columns = [_numbers(step, comparison, args) for step in (accumulation, one_pass)]
    million = "per million tokens"
    timed = "a step takes at least" if args.compute else "drive time of a step"
    rows: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("micro-steps", lambda of: str(of["micro_steps"])),
        ("sequences of a micro-step", lambda of: str(of["sequences"])),
        ("slices of a layer", lambda of: str(of["slices"])),
        ("checkpoints", lambda of: f"on the {of['checkpoints']}"),
        ("device memory", lambda of: format_nbytes(of["device_bytes"])),
        (timed, lambda of: f"{of['seconds']:.1f} s"),
        ("tokens per second, all ranks", lambda of: f"{of['tokens_per_second']:.0f}"),
        ("read per step", lambda of: f"{of['read_bytes'] / GB:.1f} GB"),
        ("written per step", lambda of: f"{of['written_bytes'] / GB:.1f} GB"),
        (f"read {million}", lambda of: f"{of['read_bytes_per_million_tokens'] / GB:.1f} GB"),
        (f"written {million}", lambda of: f"{of['written_bytes_per_million_tokens'] / GB:.1f} GB"),
    ]
    for name, cell in rows:
        table.add_row(name, *map(cell, columns))
    return table


def comparison_json(comparison: Comparison, args: argparse.Namespace) -> dict[str, Any]:
    """Return the numbers for `--json`."""
    return {
        "slices": comparison.one_pass.slices,
        "is_chosen": comparison.is_chosen,
        "lacks": comparison.lacks,
        "one_pass": _numbers(comparison.one_pass, comparison, args),
        "accumulation": _numbers(comparison.accumulation, comparison, args),
    }


def note_on_smaller_slices(
    training: Training, room: Room | None, comparison: Comparison, args: argparse.Namespace
) -> list[str]:
    """Return a note on slices of one sequence, if the drive then moves fewer checkpoints."""
    found = room and smaller_slices(training, room, comparison, context=args.context)
    if not found:
        return []
    context, kept = found
    key = "activations.device_bytes"
    kept = page_down(kept)
    return [
        f'with "micro_batches": {{"sequences": 1}} {key} can be '
        f"{training.activations.device_bytes + kept} "
        f"({format_nbytes(training.activations.device_bytes + kept)}): each micro-step then writes "
        f"and reads {format_nbytes(context.drive_bytes - kept)} of checkpoints"
    ]


def notes_of_comparison(comparison: Comparison, args: argparse.Namespace) -> list[str]:
    """Return notes on the number of slices, and the settings of one pass."""
    step, sizes = comparison.one_pass, f"{args.device_memory} of device memory"
    if args.host_memory is not None:
        sizes += f" and {args.host_memory} of host memory"
    slices = f"{step.slices} slice(s) of up to {comparison.accumulation.sequences} sequence(s)"
    notes = []
    if comparison.lacks:
        lacking = " and ".join(f"{format_nbytes(n)} of {k}" for k, n in comparison.lacks.items())
        reason = "no number of slices fits: " if comparison.is_chosen else ""
        notes.append(f"one pass: {reason}with {slices} it lacks {lacking}")
    elif comparison.is_chosen and args.device_memory is None:
        if args.batch > 1:
            notes.append(
                "--device-memory chooses the number of slices for one pass per step, and "
                "--micro-batches states it: both compare it with accumulation"
            )
    elif comparison.is_chosen:
        notes.append(f"one pass: {slices} are the fewest that fit {sizes}")
    if step.slices > 1:
        notes += _settings(step, args)
    if args.compute is not None:
        forward_s, backward_s = args.compute
        seconds = _numbers(step, comparison, args)["seconds"]
        notes.append(
            f"with passes that compute for {forward_s:g} s and {backward_s:g} s for "
            f"{step.sequences} sequence(s), one pass takes {seconds:.1f} s or longer"
        )
    if step.micro_steps > 1:
        total = step.micro_steps * args.batch
        notes.append(
            f"gradient_accumulation_steps is {step.micro_steps} here, and --batch the sequences of "
            f"each micro-step; with gradient_accumulation_steps 1, --batch {total} counts the same "
            "sequences in one pass"
        )
    return notes


def _settings(step: Step, args: argparse.Namespace) -> list[str]:
    block: dict[str, Any] = {"micro_batches": {"count": step.slices}}
    if step.context.way.place == "drive":
        block["activations"] = {"enabled": True}
    wanted = {
        "train_micro_batch_size_per_gpu": step.sequences,
        "gradient_accumulation_steps": step.micro_steps,
        BLOCK_KEY: block,
    }
    notes = [f"one pass needs gradient checkpointing and {json.dumps(wanted)[1:-1]}"]
    if step.context.drive_bytes:
        moved = step.context.drive_bytes * step.micro_steps
        notes.append(
            f"one pass writes {format_nbytes(moved)} of checkpoints in a step and reads them, "
            "counted above: the device has no room for those of the whole batch"
        )
    return notes


def _numbers(step: Step, comparison: Comparison, args: argparse.Namespace) -> dict[str, Any]:
    """Return the numbers of a step: bytes of one rank, tokens per second of all ranks."""
    seconds = drive_seconds(step.footprint, args)
    if args.compute is not None:
        # The seconds are those of a batch, which accumulation divides into micro-steps.
        share = comparison.one_pass.micro_steps / step.micro_steps
        drive = drive_time(step.plan, args, activation_bytes=step.context.drive_bytes)
        seconds = drive.step_s(*(share * one for one in args.compute))
    return {
        "micro_steps": step.micro_steps,
        "sequences": step.sequences,
        "slices": step.slices,
        "tokens": step.tokens,
        "checkpoints": step.context.way.place,
        "device_bytes": step.context.device_bytes,
        "read_bytes": step.read_bytes,
        "written_bytes": step.written_bytes,
        "read_bytes_per_million_tokens": step.per_million_tokens(step.read_bytes),
        "written_bytes_per_million_tokens": step.per_million_tokens(step.written_bytes),
        "seconds": seconds,
        "tokens_per_second": step.tokens * args.world / seconds,
    }
