"""`memascend plan`: host memory, drive space and traffic of a run, before anything is allocated.

The answer comes first: whether it fits this machine, the drive's bytes, a step's time, the wear.
Then accounts side by side: stock DeepSpeed, tuned, with the paper's four pieces, memascend. Needs
neither torch nor DeepSpeed. Exit status: 0 with a plan, 1 without one (a limit too small, a file
that cannot be read), 2 for a mistake in the command line.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from memascend.base.json_text import read_json_object
from memascend.base.units import GIB, format_nbytes
from memascend.cli.arguments import folder, whole_number
from memascend.cli.plan_accounts import (
    DEFAULT_CONFIG,
    PIECES,
    Accounts,
    accounts_of,
    block_of,
    check_run,
    volumes_of,
)
from memascend.cli.plan_answer import answer_of, print_answer, training_of
from memascend.cli.plan_context import (
    add_context_options,
    check_context_options,
    context_json,
    fit_cells,
    is_asked,
    print_context,
    resolve_batch,
    way_that_fits,
)
from memascend.cli.plan_machine import read_machine
from memascend.cli.plan_models import find_model
from memascend.cli.plan_notes import notes_of, warnings_of
from memascend.cli.plan_plot import plot
from memascend.cli.plan_time import (
    add_time_options,
    drive_seconds,
    ranks_of_node,
    rates_of,
    time_json,
)
from memascend.config.deepspeed import parse_deepspeed
from memascend.config.volumes import VolumeConfig
from memascend.plan.derive import Plan
from memascend.plan.footprint import Footprint
from memascend.plan.shapes import builtin, builtin_names
from memascend.plan.stock import StockPlan

BILLION = 10**9
#: Columns of `--table` that a narrow terminal has no room for.
_LEFT_OUT = ("four pieces", "less than tuned stock")


def plan_command_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "plan",
        help="memory, drive space and traffic of a run, before anything is allocated",
        description="Memory, drive space and traffic of a run, before anything is allocated.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a name on the Hub, such as Qwen/Qwen3-8B; a config.json, a .safetensors file, its "
        "index or a model's folder; where transformers is installed, any config.json that it "
        "knows. Known names: " + ", ".join(builtin_names()),
    )
    parser.add_argument("--config", type=Path, help="a DeepSpeed JSON (default: see the output)")
    parser.add_argument(
        "--limit",
        help='host memory per rank: "6GiB", bytes, or a fraction of the total memory, such as 0.5',
    )
    parser.add_argument("--world", type=whole_number, default=1, help="ranks (default: 1)")
    parser.add_argument(
        "--nodes",
        type=whole_number,
        default=1,
        help="machines that the ranks are on, each with its own drive (default: 1)",
    )
    add_time_options(parser)
    parser.add_argument(
        "--path",
        type=folder,
        help="folder on the drive, for its free space; its rates are measured once for some "
        "seconds, unless they are known or stated (default: the config's, else ., not measured)",
    )
    parser.add_argument("--verbose", action="store_true", help="all columns, and notes")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a bar chart")
    parser.add_argument(
        "--table",
        action="store_true",
        help="all built-in models; as Markdown unless it is shown on a terminal",
    )
    add_context_options(parser)
    parser.set_defaults(run=plan_command, usage_error=parser.error)


def plan_command(args: argparse.Namespace) -> int:
    """Derive the accounts, print them, and return the exit status."""
    if (args.model is None) != args.table:
        args.usage_error("give either MODEL or --table")
    if args.table and (args.json or args.plot is not None):
        args.usage_error("--json and --plot need MODEL: --table has all built-in models")
    if args.world % args.nodes:
        args.usage_error(
            f"--world {args.world} is not a multiple of --nodes {args.nodes}: each machine needs "
            "the same number of ranks. "
            f"Nearest: --world {max(1, round(args.world / args.nodes)) * args.nodes}"
        )
    ds_config = DEFAULT_CONFIG if args.config is None else read_json_object(args.config, "--config")
    settings, block = parse_deepspeed(ds_config), block_of(ds_config, args)
    warnings = [] if args.config is None else check_run(ds_config, settings)
    warnings += resolve_batch(settings, args)
    check_context_options(args)
    volumes = volumes_of(settings, block)
    if args.path is not None:
        volumes = (VolumeConfig(path=str(args.path)),)
    args.drive = rates_of(args, [volume.path for volume in volumes])
    account = functools.partial(accounts_of, settings=settings, block=block, args=args)
    if args.table and args.fit:
        _print_cells(fit_cells(lambda shapes: training_of(account(shapes), args), args))
        return 0
    if args.table:
        _print_cells(cells_of([account(builtin(name)) for name in builtin_names()]))
        return 0
    accounts = account(find_model(args.model))
    training = training_of(accounts, args) if is_asked(args) else None
    answer = answer_of(accounts, read_machine(args, volumes), args)
    warnings += warnings_of(accounts, accumulates=training is None)
    if args.json:
        shown = _as_json(accounts, args) | {"answer": answer.as_dict(), "warnings": warnings}
        shown |= {} if training is None else context_json(training, args)
        print(json.dumps(shown, indent=2))
    else:
        console = Console()
        way = "" if training is None else way_that_fits(training, args)
        print_answer(answer, accounts, args, console, way_that_fits=way)
        for warning in warnings:
            console.print(f"! {warning}", markup=False, highlight=False)
        if training is not None:
            print_context(training, args)
        else:
            _print_table(accounts, args, console)
        if not args.verbose:
            console.print("--verbose: how these numbers were found, and other settings")
    if args.plot is not None:
        plot(accounts.columns(), accounts.shapes.name, args.plot)
    return 0


def cells_of(rows: list[Accounts]) -> list[list[str]]:
    """Return the table of docs/memory.md, titles first: peak host memory of one rank in GiB."""
    titles = ["model", "billion parameters", "stock", "tuned stock", "four pieces", "memascend"]
    titles += ["less than tuned stock", "on the drive"]
    table = [titles]
    for row in sorted(rows, key=lambda row: row.shapes.numel):
        cells = [row.shapes.name, f"{row.shapes.numel / BILLION:.1f}"]
        for plan in (row.stock, row.tuned, row.four_pieces):
            cells.append(f"{plan.peak_bytes / GIB:.1f}")
        cells += [f"**{row.memascend.peak_bytes / GIB:.1f}**", _saved(row.memascend, row.tuned)]
        table.append([*cells, f"{row.memascend.drive_bytes / GIB:.0f}"])
    return table


# -- showing ---------------------------------------------------------------------------------------


def is_terminal() -> bool:
    """Return whether the output goes to a terminal."""
    return sys.stdout.isatty()


def _print_cells(cells: list[list[str]]) -> None:
    """Print a table, titles first, in Markdown; on a terminal drawn, with the columns that fit."""
    if not is_terminal():
        lines = [f"| {' | '.join(row)} |" for row in cells]
        print("\n".join([lines[0], "|---" * len(cells[0]) + "|", *lines[1:]]))
        return
    titles, *rows = ([cell.strip("*") for cell in row] for row in cells)
    console = Console()
    shown = [n for n, title in enumerate(titles) if title not in _LEFT_OUT or console.width > 110]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for number in shown:
        words = [word for row in (titles, *rows) for word in row[number].split()]
        table.add_column(titles[number], no_wrap=number < 2, min_width=max(map(len, words)))
    for row in rows:
        table.add_row(*(row[number] for number in shown))
    console.print(table)


def _print_table(accounts: Accounts, args: argparse.Namespace, console: Console) -> None:
    columns = accounts.columns()
    if not args.verbose:  # four columns are too wide for a terminal
        del columns[PIECES]
    table = Table(title="one rank")
    table.add_column("")
    for title in columns:
        table.add_column(title, justify="right")

    def add(name: str, cells: Iterable[int | str], style: str | None = None) -> None:
        texts = [cell if isinstance(cell, str) else format_nbytes(cell) for cell in cells]
        table.add_row(name, *texts, style=style)

    plans = list(columns.values())
    for name in dict.fromkeys(name for plan in plans for name in plan.host):
        if any(plan.host.get(name) for plan in plans):
            title = name.split(" ", 1)[1] if name[1:2] == " " else name  # stock's have a letter
            add(title, (plan.host.get(name, "") for plan in plans))
    table.add_section()
    add("host memory", (plan.host_bytes for plan in plans), style="bold")
    add("highest at the start", (plan.initialization_bytes for plan in plans))
    add("highest in a step", (plan.step_bytes for plan in plans))
    add("less than tuned stock", (_saved(plan, accounts.tuned) for plan in plans))
    ranks = ranks_of_node(args)
    if ranks > 1:
        add(f"host memory, {ranks} ranks", (plan.host_bytes * ranks for plan in plans))
    table.add_section()
    add("on the drive", (plan.drive_bytes for plan in plans))
    add("read per step", (sum(plan.read_bytes.values()) for plan in plans))
    add("written per step", (sum(plan.written_bytes.values()) for plan in plans))
    add("drive time of a step", (f"{drive_seconds(plan, args):.1f} s" for plan in plans))
    console.print(table)
    for note in notes_of(accounts, args) if args.verbose else ():
        console.print(f"- {note}", markup=False, highlight=False)


def _saved(plan: Footprint, tuned: Footprint) -> str:
    """Return how much less memory a plan's peak is than that of stock; empty for stock itself."""
    if isinstance(plan, StockPlan):
        return ""
    return f"{math.floor(100 * (1 - plan.peak_bytes / max(1, tuned.peak_bytes)))} %"


def _as_json(accounts: Accounts, args: argparse.Namespace) -> dict[str, Any]:
    plans: dict[str, Footprint] = {
        "stock": accounts.stock,
        "tuned_stock": accounts.tuned,
        "four_pieces": accounts.four_pieces,
        "memascend": accounts.memascend,
    }
    return {
        "model": accounts.shapes.name,
        "parameters": accounts.shapes.numel,
        "world": args.world,
        "nodes": args.nodes,
        "drive_read_gb_s": args.drive.rates.read_gb_s,
        "drive_write_gb_s": args.drive.rates.write_gb_s,
        "drive_mixed_gb_s": args.drive.rates.both_gb_s,
        **{
            name: dataclasses.asdict(plan)
            | {
                "host_bytes": plan.host_bytes,
                "initialization_bytes": plan.initialization_bytes,
                "step_bytes": plan.step_bytes,
                "drive_bytes": plan.drive_bytes,
                "step_seconds": drive_seconds(plan, args),
            }
            | (time_json(plan, args) if isinstance(plan, Plan) else {})
            for name, plan in plans.items()
        },
    }
