"""Context in `memascend plan`: the options `--context`, `--batch`, `--fit` and their output.

Device memory by component, host memory and traffic, for each way to train; and the longest context
that fits. The arithmetic is in memascend/plan/context.py and fit.py.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from memascend.base.units import GIB, format_nbytes, page_down
from memascend.cli.arguments import size, whole_number
from memascend.cli.plan_accounts import DEFAULT_NOTE
from memascend.cli.plan_one_pass import (
    ONE_PASS,
    comparison_json,
    comparison_table,
    context_of,
    largest_slice,
    note_on_smaller_slices,
    notes_of_comparison,
    slice_tokens_of,
)
from memascend.cli.plan_sizes import device_bytes_of, host_bytes_of
from memascend.cli.plan_time import drive_seconds, ranks_of_node, rate_notes
from memascend.config.deepspeed import DeepSpeedSettings
from memascend.plan.context import (
    HOST_RESERVE_BYTES,
    OURS_CHECKPOINTS,
    OURS_ON_DEVICE,
    STOCK_CHECKPOINTS,
    STOCK_ON_HOST,
    WAYS,
    ContextPlan,
    Training,
    Way,
    with_activations,
)
from memascend.plan.derive import Plan, derive
from memascend.plan.fit import TOKENS_MAX, Fit, Room, fit
from memascend.plan.knobs import LimitTooSmallError
from memascend.plan.layers import LOGITS_BYTES
from memascend.plan.one_pass import Comparison, compare
from memascend.plan.shapes import ModelShapes, builtin

#: Model and machines of the table that `--table --fit` prints.
TABLE_MODEL = "Llama-3.1-8B"
TABLE_DEVICES, TABLE_HOSTS = (24 * GIB, 48 * GIB, 96 * GIB), (32 * GIB, 64 * GIB, 128 * GIB)
TABLE_WAYS = (STOCK_CHECKPOINTS, STOCK_ON_HOST, OURS_CHECKPOINTS)
TABLE_CONTEXT = 4096
#: The ways that are shown without --verbose, in one table.
_SHOWN_TITLES = (STOCK_CHECKPOINTS.title, OURS_ON_DEVICE.title, OURS_CHECKPOINTS.title, ONE_PASS)
#: With four columns of numbers this wide, 80 columns leave 20 for the names of rows.
_NUMBER_WIDTH = 11
#: Of the table of contexts that fit: a way takes two lines, "host memory by 28.64 GiB" one.
_WAY_WIDTH, _COUNT_WIDTH = 24, 9
WEAR_STEPS = 1000
TERABYTE = 10**12


def add_context_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    group = parser.add_argument_group("device memory and context")
    group.add_argument(
        "--context", type=whole_number, metavar="TOKENS", help="tokens of one sequence"
    )
    group.add_argument(
        "--batch",
        type=whole_number,
        metavar="N",
        help="sequences per rank and micro-step (default: of --config, else 1)",
    )
    group.add_argument(
        "--micro-batches",
        type=whole_number,
        metavar="K",
        help="slices of a batch that is computed in one pass (default: of the config's block, else "
        "the fewest that fit --device-memory)",
    )
    for option, help_text in (
        ("--device-memory", 'of one rank, such as "24GiB"'),
        ("--host-memory", "of one rank, with Python and torch"),
        ("--drive-space", 'free on the drives of one machine, such as "1.8TB"'),
    ):
        group.add_argument(option, type=size, metavar="SIZE", help=help_text)
    group.add_argument(
        "--fused-loss", action="store_true", help="logits are computed in chunks (Liger, TRL)"
    )
    group.add_argument(
        "--tiled-mlp", action="store_true", help="MLPs process their tokens in tiles (ALST)"
    )
    group.add_argument(
        "--fit",
        action="store_true",
        help="the longest context, and with --context the largest batch, in that memory",
    )


def resolve_batch(settings: DeepSpeedSettings, args: argparse.Namespace) -> list[str]:
    """Complete --batch from the JSON; return a warning if both state it, and differ.

    `has_batch` tells whether either does: else a context is planned for one sequence.
    """
    stated, given = settings.micro_batch(args.world), args.batch
    if given is not None and not is_asked(args):
        args.usage_error("--batch needs --context or --fit")
    args.batch, args.has_batch = given or stated or 1, bool(given or stated)
    if not (given and stated) or given == stated:
        return []
    return [f"--batch {given} is counted; the micro-batch of --config is {stated}"]


def check_context_options(args: argparse.Namespace) -> None:
    """Refuse combinations of options that make no sense, as a usage error."""
    if args.fit and not args.table and args.device_memory is None:
        args.usage_error("--fit needs --device-memory")
    if args.table and args.context is not None and not args.fit:
        args.usage_error("--context needs MODEL, or --fit beside --table")
    if args.compute is not None and (args.table or (args.fit and args.context is None)):
        args.usage_error("--compute cannot be combined with --table, or with --fit alone")
    if args.micro_batches is not None and args.table:
        args.usage_error("--micro-batches needs MODEL, and cannot be combined with --table")
    given = {"--micro-batches": args.micro_batches is not None}
    if args.table:
        _check_table_options(args)
    for option, is_given in given.items():
        if is_given and not is_asked(args):
            args.usage_error(f"{option} needs --context or --fit")
    if (args.context or 1) * args.batch > TOKENS_MAX:
        args.usage_error(f"--context times --batch must be at most {TOKENS_MAX} tokens")
    if (args.micro_batches or 1) > args.batch:
        args.usage_error(
            f"--micro-batches {args.micro_batches} is more than --batch {args.batch}: a slice has "
            f"at least one sequence. At most --micro-batches {args.batch}"
        )


def _check_table_options(args: argparse.Namespace) -> None:
    """Refuse options that have no effect on the tables."""
    rates = ("drive_read", "drive_write", "drive_mixed")
    given = dict.fromkeys(("path", "drive_space", "verbose", *rates), "MODEL")
    if not args.fit:
        sizes = ("device_memory", "host_memory", "fused_loss", "tiled_mlp")
        given |= dict.fromkeys(sizes, "--context or --fit")
    for name, needed in given.items():
        if getattr(args, name) not in (None, False):
            args.usage_error(f"--{name.replace('_', '-')} needs {needed}")


def is_asked(args: argparse.Namespace) -> bool:
    """Return whether --context or --fit is given."""
    return args.context is not None or args.fit


def within_host_memory(shapes: ModelShapes, ours: Plan, args: argparse.Namespace) -> Plan:
    """Return the plan with activation slots, made to fit --host-memory if possible."""
    host_bytes = host_bytes_of(args)
    request = dataclasses.replace(ours.request, has_activations=True)
    plan = derive(shapes, request=request, limit_bytes=ours.limit_bytes)
    if host_bytes is None or plan.host_bytes + HOST_RESERVE_BYTES <= host_bytes:
        return plan
    try:
        room_bytes = max(0, host_bytes - HOST_RESERVE_BYTES)
        return derive(shapes, request=request, limit_bytes=room_bytes)
    except LimitTooSmallError:
        return plan  # the output shows the missing bytes


def context_json(training: Training, args: argparse.Namespace) -> dict[str, Any]:
    """Return the numbers for `--json`."""
    found: dict[str, Any] = {}
    if args.context is not None:
        comparison = _comparison(training, args)
        found["one_pass"] = comparison_json(comparison, args)
        plans = _plans(training, comparison, args)
        found["context"] = {
            "context": args.context,
            "batch": args.batch,
            "fused_loss": args.fused_loss,
            "tiled_mlp": args.tiled_mlp,
            "ways": {
                plan.way.title: dataclasses.asdict(plan)
                | {"device_bytes": plan.device_bytes, "added_seconds": added}
                for plan, added in ((plan, _added_seconds(training, plan, args)) for plan in plans)
            },
        }
    if args.fit:
        found["fit"] = {
            title: {"context": longest.count, "limits": longest.limits}
            | ({} if largest is None else {"batch": largest.count})
            for title, (longest, largest) in _fits(training, args).items()
        }
        if args.context is not None:
            found["fit"][ONE_PASS]["slice"] = _largest_slice(training, args)
    return found


def print_context(training: Training, args: argparse.Namespace) -> None:
    """Print the tables and notes."""
    console = Console()
    if args.context is not None:
        comparison = _comparison(training, args)
        plans = _plans(training, comparison, args)
        shown = [[plan for plan in plans if plan.way.title in _SHOWN_TITLES]]
        if args.verbose:  # seven columns are too wide for a terminal
            shown = [[p for p in plans if p.way.has_memascend == has] for has in (False, True)]
        for columns in shown:
            console.print(_table_of_bytes(training, columns, args))
        if comparison.one_pass.slices > 1:
            console.print(comparison_table(training, comparison, args))
        notes = (_notes if args.verbose else _advices)(training, plans, args)
        notes += note_on_smaller_slices(training, _room(args), comparison, args)
        for note in notes + notes_of_comparison(comparison, args):
            console.print(f"- {note}", markup=False, highlight=False)
    if args.fit:
        console.print(_table_of_fits(training, args))
        if args.context is not None and (sequences := _largest_slice(training, args)):
            note = f"one pass over {args.batch} sequence(s): slices of up to {sequences} fit"
            console.print(f"- {note}", markup=False, highlight=False)


def fit_cells(training_of_model: Callable[[ModelShapes], Training], args: Any) -> list[list[str]]:
    """Return the table of contexts that fit, for a model and a few machines, titles first.

    A memory size on the command line replaces those of the table.
    """
    context = args.context or TABLE_CONTEXT
    table = [["model", "device, GiB", "host, GiB", *(way.title for way in TABLE_WAYS)]]
    device, host = device_bytes_of(args), host_bytes_of(args)
    training = training_of_model(builtin(TABLE_MODEL))
    for device_bytes in TABLE_DEVICES if device is None else (device,):
        for host_bytes in TABLE_HOSTS if host is None else (host,):
            room = Room(device_bytes=device_bytes, host_bytes=host_bytes)
            sizes = [f"{nbytes / GIB:g}" for nbytes in (device_bytes, host_bytes)]
            cells = [_cell(training, way, room, args.batch, context) for way in TABLE_WAYS]
            table.append([TABLE_MODEL, *sizes, *cells])
    return table


# -- computing -------------------------------------------------------------------------------------


def _room(args: argparse.Namespace) -> Room | None:
    device_bytes = device_bytes_of(args)
    if device_bytes is None:
        return None
    return Room(device_bytes=device_bytes, host_bytes=host_bytes_of(args))


def way_that_fits(training: Training, args: argparse.Namespace) -> str:
    """Return how the batch fits the stated device if not at once, or nothing."""
    if args.context is None or _room(args) is None:
        return ""
    comparison = _comparison(training, args)
    if comparison.lacks:
        return ""
    step = comparison.one_pass
    if step.slices > 1:
        return f"in one pass of {step.slices} slices"
    return "with checkpoints on the drive" if step.context.way.place == "drive" else ""


def _comparison(training: Training, args: argparse.Namespace) -> Comparison:
    return compare(training, _room(args), batch=args.batch, context=args.context)


def _largest_slice(training: Training, args: argparse.Namespace) -> int:
    room = _room(args) or Room(device_bytes=0)
    return largest_slice(training, room, batch=args.batch, context=args.context)


def _plans(
    training: Training, comparison: Comparison, args: argparse.Namespace
) -> list[ContextPlan]:
    """Return the ways to train; one pass is one of them if it has slices."""
    tokens, device_bytes = args.context * args.batch, device_bytes_of(args) or 0
    plans = [training.plan(way, tokens, device_bytes=device_bytes) for way in WAYS]
    return plans + ([context_of(comparison)] if comparison.one_pass.slices > 1 else [])


def _fits(training: Training, args: argparse.Namespace) -> dict[str, tuple[Fit, Fit | None]]:
    """Return by title the longest context, and the largest batch if a context is given."""
    room = _room(args) or Room(device_bytes=0)
    units = (args.batch, args.context)
    found = {}
    for way in WAYS:
        longest, largest = (
            unit and fit(training, way, room=room, unit_tokens=unit) for unit in units
        )
        found[way.title] = longest, largest
    if args.batch > 1 or args.context is not None:
        slices = (
            slice_tokens_of(training, batch=args.batch),
            slice_tokens_of(training, context=args.context),
        )
        longest, largest = (
            unit
            and fit(training, OURS_CHECKPOINTS, room=room, unit_tokens=unit, slice_tokens_of=of)
            for unit, of in zip(units, slices, strict=True)
        )
        found[ONE_PASS] = longest, largest
    return found


def _added_seconds(training: Training, plan: ContextPlan, args: argparse.Namespace) -> float:
    """Return the seconds of drive time that activations add to a step."""
    steps = training.ours.request.gradient_accumulation_steps
    with_them = with_activations(training.ours, plan.drive_bytes, steps)
    return drive_seconds(with_them, args) - drive_seconds(training.ours, args)


# -- showing ---------------------------------------------------------------------------------------


def _table_of_bytes(
    training: Training, plans: list[ContextPlan], args: argparse.Namespace
) -> Table:
    table = Table(
        title=f"{escape(training.shapes.name)}: a context of {args.context} tokens, "
        f"batch {args.batch}, {training.ours.request.precision}; bytes of one rank"
    )
    table.add_column("")
    for plan in plans:
        place = f", checkpoints on the {plan.way.place}" if plan.way.title == ONE_PASS else ""
        table.add_column(f"{plan.way.title}{place}", justify="right", width=_NUMBER_WIDTH)

    def add(name: str, cells: Iterable[int | str | None], style: str | None = None) -> None:
        texts = [cell if isinstance(cell, str) else _shown(cell) for cell in cells]
        table.add_row(name, *texts, style=style)

    def add_all(of: Callable[[ContextPlan], Mapping[str, int]]) -> None:
        for name in dict.fromkeys(name for plan in plans for name in of(plan)):
            add(name, (of(plan).get(name) for plan in plans))

    add_all(lambda plan: plan.device)
    table.add_section()
    add_all(lambda plan: plan.moments)
    add("device memory at most", (p.device_bytes for p in plans), style="bold")
    table.add_section()
    add("host memory of activations", (plan.host_activation_bytes for plan in plans))
    add("host memory at most", (plan.host_bytes for plan in plans), style="bold")
    table.add_section()
    steps, ranks = training.ours.request.gradient_accumulation_steps, ranks_of_node(args)
    moved = [plan.drive_bytes * steps for plan in plans]
    add("activations on the drive", (plan.drive_bytes for plan in plans))
    add("written, read per step", moved)
    added = (_added_seconds(training, plan, args) for plan in plans)
    add("adds to a step, at least", (f"{seconds:.1f} s" for seconds in added))
    written = (f"{nbytes * WEAR_STEPS * ranks / TERABYTE:.2f} TB" for nbytes in moved)
    add(f"written in {WEAR_STEPS} steps{f' by {ranks} ranks' * (ranks > 1)}", written)
    return table


def _table_of_fits(training: Training, args: argparse.Namespace) -> Table:
    sizes = f"{args.device_memory} of device memory"
    if args.host_memory is not None:
        sizes += f", {args.host_memory} of host memory"
    table = Table(title=f"{escape(training.shapes.name)}: contexts in {sizes}, one rank")
    table.add_column("", width=_WAY_WIDTH)
    titles = [f"longest context, batch {args.batch}"]
    titles += [] if args.context is None else [f"largest batch, context {args.context}"]
    for title in titles:
        table.add_column(title, justify="right", width=_COUNT_WIDTH)
    table.add_column("limited by")
    for title, (longest, largest) in _fits(training, args).items():
        counts = [f"{found.count:,}" for found in (longest, largest) if found is not None]
        lacking = [f"{name} by {format_nbytes(n)}" for name, n in longest.limits.items()]
        ends = longest.limits if longest.count else lacking
        table.add_row(title, *counts, ", ".join(ends))
    return table


def _cell(training: Training, way: Way, room: Room, batch: int, context: int) -> str:
    """Return the longest context in thousands, and the largest batch."""
    longest = fit(training, way, room=room, unit_tokens=batch)
    if not longest.count:
        return f"no: {' and '.join(longest.limits)}"
    largest = fit(training, way, room=room, unit_tokens=context)
    return f"{longest.count // 1000}k, {largest.count}"


def _shown(nbytes: int | None) -> str:
    return "" if nbytes is None else format_nbytes(nbytes)


def _notes(training: Training, plans: list[ContextPlan], args: argparse.Namespace) -> list[str]:
    notes = [
        "checkpoints are those of gradient checkpointing: one hidden state for each layer, which "
        "backward recomputes; their bytes are exact, unlike those marked as estimates",
        "attention is assumed to be a flash or sdpa kernel; eager attention needs memory quadratic "
        "in the context",
    ]
    if args.config is None:
        notes.insert(0, DEFAULT_NOTE)
    if not training.has_fused_loss:
        notes.append(
            f"logits take {LOGITS_BYTES} bytes for each token and entry of the vocabulary; a fused "
            "loss computes them in chunks: --fused-loss counts with one"
        )
    elif training.micro_batches is not None:
        notes.append(
            "the fused loss is computed in slices, as those of Liger and TRL are; one of a script "
            "takes hidden states of the whole batch"
        )
    notes.append(
        f"{format_nbytes(HOST_RESERVE_BYTES)} of host memory are for Python, torch and the "
        "device's libraries (estimate)"
    )
    return notes + rate_notes(args) + _advices(training, plans, args)


def _advices(training: Training, plans: list[ContextPlan], args: argparse.Namespace) -> list[str]:
    """Return advice on the section `activations`: whether it is needed, and its best value."""
    by_title = {plan.way.title: plan for plan in plans}
    ours = by_title.get(ONE_PASS, by_title[OURS_CHECKPOINTS.title])
    if not ours.drive_bytes:
        return []
    device_bytes = device_bytes_of(args)
    advice = _advice(training, ours, device_bytes)
    if training.activations.enabled:
        return [advice]
    note = (
        'columns with checkpoints or activations on the drive need "activations": {"enabled": '
        "true} in the block"
    )
    if device_bytes is not None and ONE_PASS not in by_title:
        if by_title[OURS_ON_DEVICE.title].device_bytes <= device_bytes:
            return [f"{note}; not needed here: the device has room for the checkpoints"]
        if ours.device_bytes <= device_bytes:
            note += f"; with it {format_nbytes(ours.device_bytes)} of device memory are enough"
    return [note, advice]


def _advice(training: Training, ours: ContextPlan, device_bytes: int | None) -> str:
    """Return the value of `device_bytes` with the least writes."""
    key = "activations.device_bytes"
    if device_bytes is None:
        return f"a larger {key} reduces writes; with --device-memory the largest value is shown"
    spare_bytes = device_bytes - ours.device_bytes
    if spare_bytes < 0:
        return f"{ours.way.title}: the device lacks {format_nbytes(-spare_bytes)}"
    stays = page_down(min(spare_bytes, ours.drive_bytes))
    kept = training.activations.device_bytes + stays
    return (
        f"{key} can be {kept} ({format_nbytes(kept)}) for {ours.way.title}: each micro-step then "
        f"writes and reads {format_nbytes(stays)} of {format_nbytes(ours.drive_bytes)} less"
    )
