"""`memascend plan`: host memory, drive space and traffic of a run, before anything is allocated.

Three accounts side by side: stock DeepSpeed, stock with the paper's four pieces, memascend. Needs
neither torch nor DeepSpeed. Exit status: 0 with a plan, 1 without one (a limit too small, a file
that cannot be read), 2 for a mistake in the command line.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from memascend.base.json_text import read_json_object
from memascend.base.streams import PARAMETERS
from memascend.base.units import GIB, TIB, format_nbytes
from memascend.cli.plan_context import (
    add_context_options,
    check_context_options,
    context_json,
    fit_markdown,
    is_asked,
    print_context,
    whole_number,
    within_host_memory,
)
from memascend.cli.plan_plot import plot
from memascend.cli.plan_time import (
    add_time_options,
    drive_seconds,
    ranks_of_node,
    rates_of,
    time_json,
    time_notes,
)
from memascend.config.block import MemAscendConfig, find_block, parse_block
from memascend.config.deepspeed import DeepSpeedSettings, parse_deepspeed
from memascend.config.environment import is_disabled
from memascend.config.limit import parse_limit
from memascend.errors import ConfigError
from memascend.plan.advice import (
    advise,
    advise_in_cpu,
    advise_one_pass,
    advise_pinning,
    advise_wear,
)
from memascend.plan.context import DeviceSettings, Training, widths_of
from memascend.plan.derive import ROUNDING, Plan, PlanRequest, derive
from memascend.plan.footprint import Footprint
from memascend.plan.muon import advise_muon
from memascend.plan.optimizer_dtypes import check_fewer, check_masters, fewer_bits, inexactness
from memascend.plan.release import check_release
from memascend.plan.request import (
    check_limit_can_be_kept,
    sections_off,
    why_not_during_backward,
    why_whole_steps,
)
from memascend.plan.shapes import ModelShapes, builtin, builtin_names, from_config, from_safetensors
from memascend.plan.stock import StockPlan, four_pieces, stock
from memascend.system.memory import memory_total

BILLION = 10**9
#: The values of Hugging Face's example, used without --config.
DEFAULT_CONFIG: dict[str, Any] = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "sub_group_size": 10**9,
        "offload_param": {"device": "nvme", "buffer_count": 5, "max_in_cpu": 10**9},
        "offload_optimizer": {"device": "nvme", "buffer_count": 4},
    },
    "optimizer": {"type": "AdamW"},
    "gradient_accumulation_steps": 1,
}
#: The largest file of ext4 with blocks of 4 KiB.
EXT4_FILE_BYTES = 16 * TIB

DEFAULT_NOTE = (
    "no --config: bf16, AdamW, sub_group_size 1e9, buffer_count 5 and 4, max_in_cpu 1e9, "
    "pin_memory, gradient_accumulation_steps 1"
)
STOCK, PIECES, OURS = "stock 0.19.8", "four pieces", "memascend"


@dataclasses.dataclass(frozen=True, slots=True)
class Accounts:
    """The three accounts of one model, and their inputs."""

    settings: DeepSpeedSettings
    block: MemAscendConfig
    shapes: ModelShapes
    stock: StockPlan
    four_pieces: StockPlan
    memascend: Plan

    def columns(self) -> dict[str, Footprint]:
        """Return the accounts by title, in the order of display."""
        return {STOCK: self.stock, PIECES: self.four_pieces, OURS: self.memascend}


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
        help="a config.json, a .safetensors file, its index or a model's folder, or one of: "
        + ", ".join(builtin_names()),
    )
    parser.add_argument("--config", type=Path, help="a DeepSpeed JSON (default: see the output)")
    parser.add_argument(
        "--limit",
        help='host memory per rank: "6GiB", bytes, or a fraction of available memory, such as 0.5',
    )
    parser.add_argument("--world", type=whole_number, default=1, help="ranks (default: 1)")
    parser.add_argument(
        "--nodes",
        type=whole_number,
        default=1,
        help="machines that the ranks are on, each with its own drive (default: 1)",
    )
    add_time_options(parser)
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a bar chart")
    parser.add_argument(
        "--table", action="store_true", help="all built-in models, as a Markdown table"
    )
    add_context_options(parser)
    parser.set_defaults(run=plan_command, usage_error=parser.error)


def plan_command(args: argparse.Namespace) -> int:
    """Derive the accounts, print them, and return the exit status."""
    if (args.model is None) != args.table:
        args.usage_error("give either MODEL or --table")
    check_context_options(args)
    if args.world % args.nodes:
        args.usage_error(
            f"--world {args.world} is not a multiple of --nodes {args.nodes}: each machine needs "
            "the same number of ranks. "
            f"Nearest: --world {max(1, round(args.world / args.nodes)) * args.nodes}"
        )
    ds_config = DEFAULT_CONFIG if args.config is None else read_json_object(args.config, "--config")
    settings, block = parse_deepspeed(ds_config), _block(ds_config, args)
    args.drive = rates_of(args, _volume_paths(settings, block))
    accounts_of = functools.partial(_accounts, settings=settings, block=block, args=args)
    if args.table and args.fit:
        print(fit_markdown(lambda shapes: _training(accounts_of(shapes), args), args))
        return 0
    if args.table:
        print(markdown([accounts_of(builtin(name)) for name in builtin_names()]))
        return 0
    accounts = accounts_of(find_model(args.model))
    training = _training(accounts, args) if is_asked(args) else None
    if args.json:
        found = _as_json(accounts, args)
        found |= {} if training is None else context_json(training, args)
        print(json.dumps(found, indent=2))
    elif training is not None:
        print_context(training, args)
    else:
        _print_table(accounts, args)
    if args.plot is not None:
        plot(accounts.columns(), accounts.shapes.name, args.plot)
    return 0


def find_model(name: str) -> ModelShapes:
    """Return the shapes of a model, from a path or the name of a built-in model.

    Raises:
        ConfigError: No such path or model, or it cannot be read.
    """
    path = Path(name)
    if path.is_dir():
        if (path / "config.json").exists():
            try:
                return from_config(path / "config.json")  # exact, also in the order of tensors
            except ConfigError:
                if not any(path.glob("*.safetensors")):
                    raise
        return from_safetensors(path, name=path.resolve().name)
    if path.is_file():
        is_config = path.suffix == ".json" and not path.name.endswith(".index.json")
        return from_config(path) if is_config else from_safetensors(path)
    return builtin(name)


def markdown(rows: list[Accounts]) -> str:
    """Return the table of the README: steady and peak host memory of one rank in GiB."""
    titles = ["model", "parameters", "stock", "at its peak", "four pieces", "at its peak"]
    lines = [f"| {' | '.join([*titles, 'memascend', 'less than stock', 'on the drive'])} |"]
    lines.append("|---" * 9 + "|")
    for row in sorted(rows, key=lambda row: row.shapes.numel):
        cells = [row.shapes.name, f"{row.shapes.numel / BILLION:.1f} billion"]
        for plan in (row.stock, row.four_pieces):
            cells += [f"{plan.host_bytes / GIB:.1f}", f"{plan.peak_bytes / GIB:.1f}"]
        cells += [f"**{row.memascend.host_bytes / GIB:.1f}**", _saved(row.memascend, row.stock)]
        cells.append(f"{row.memascend.drive_bytes / GIB:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _accounts(
    shapes: ModelShapes,
    *,
    settings: DeepSpeedSettings,
    block: MemAscendConfig,
    args: argparse.Namespace,
) -> Accounts:
    request = PlanRequest.from_deepspeed(
        settings, block=block, world=args.world, local_world=ranks_of_node(args)
    )
    check_limit_can_be_kept(block, settings)
    check_fewer(block, settings)
    check_masters(block, settings)
    check_release(block, settings)
    limit_bytes = _limit(block, args)
    ours = request
    if args.config is None or limit_bytes is not None:
        # The tutorials set max_in_cpu for stock; a limit overrides it.
        ours = dataclasses.replace(request, max_in_cpu=0)
    return Accounts(
        settings,
        block,
        shapes,
        stock(shapes, request=request, settings=settings),
        four_pieces(shapes, request=request, settings=settings),
        derive(shapes, request=ours, limit_bytes=limit_bytes),
    )


def _training(accounts: Accounts, args: argparse.Namespace) -> Training:
    hidden = widths_of(accounts.shapes).hidden
    return Training(
        shapes=accounts.shapes,
        stock=accounts.stock,
        ours=within_host_memory(accounts.shapes, accounts.memascend, args),
        device=DeviceSettings.from_deepspeed(accounts.settings, hidden=hidden),
        activations=accounts.block.activations,
        micro_batches=accounts.block.micro_batches,
        has_fused_loss=args.fused_loss,
        has_tiled_mlp=args.tiled_mlp,
    )


def _block(ds_config: Mapping[str, Any], args: argparse.Namespace) -> MemAscendConfig:
    """Return the block of the JSON, with --limit and --micro-batches in place of its own."""
    raw = dict(find_block(ds_config) or {})
    if args.micro_batches is not None:
        stated = raw.get("micro_batches")
        if isinstance(stated, Mapping) and stated.get("sequences") is not None:
            args.usage_error(
                f"--micro-batches {args.micro_batches} contradicts memascend.micro_batches."
                f"sequences={stated['sequences']} in --config, which already decides the number of "
                "slices. Leave one of them out"
            )
        others = stated if isinstance(stated, Mapping) else {}
        raw["micro_batches"] = {**others, "count": args.micro_batches}
    if args.limit is not None:
        raw["host_memory_limit"] = args.limit
        if "." in args.limit or args.limit == "1":
            with contextlib.suppress(ValueError):  # "1.5GiB" stays text
                raw["host_memory_limit"] = float(args.limit)
    return parse_block(raw)


def _volume_paths(settings: DeepSpeedSettings, block: MemAscendConfig) -> list[str]:
    """Return the paths of the volumes that a run would use; empty if the JSON names none."""
    zero = settings.zero_optimization
    fallback = zero.offload_param.nvme_path or zero.offload_optimizer.nvme_path
    return [volume.path for volume in block.volumes or ()] or ([fallback] if fallback else [])


def _limit(block: MemAscendConfig, args: argparse.Namespace) -> int | None:
    value = block.host_memory_limit
    is_fraction = isinstance(value, int | float) and value <= 1
    return parse_limit(value, available=memory_total() // ranks_of_node(args) if is_fraction else 0)


# -- showing ---------------------------------------------------------------------------------------


def _print_table(accounts: Accounts, args: argparse.Namespace) -> None:
    columns = accounts.columns()
    request = accounts.memascend.request
    table = Table(
        title=f"{escape(accounts.shapes.name)}: {accounts.shapes.numel / BILLION:.2f} billion "
        f"parameters, {request.precision}, {request.optimizer}, {request.world} rank(s) "
        f"on {args.nodes} machine(s); bytes of one rank"
    )
    table.add_column("")
    for title in columns:
        table.add_column(title, justify="right")

    def add(name: str, cells: Iterable[int | str], style: str | None = None) -> None:
        texts = [cell if isinstance(cell, str) else format_nbytes(cell) for cell in cells]
        table.add_row(name, *texts, style=style)

    plans = list(columns.values())
    for name in dict.fromkeys(name for plan in plans for name in plan.host):
        if any(plan.host.get(name) for plan in plans):
            add(name, (plan.host.get(name, "") for plan in plans))
    table.add_section()
    add("host memory", (plan.host_bytes for plan in plans), style="bold")
    add("highest at the start", (plan.initialization_bytes for plan in plans))
    add("highest in a step", (plan.step_bytes for plan in plans))
    add("less than stock", (_saved(plan, accounts.stock) for plan in plans))
    ranks = ranks_of_node(args)
    if ranks > 1:
        add(f"host memory, {ranks} ranks", (plan.host_bytes * ranks for plan in plans))
    table.add_section()
    add("on the drive", (plan.drive_bytes for plan in plans))
    add("read per step", (sum(plan.read_bytes.values()) for plan in plans))
    add("written per step", (sum(plan.written_bytes.values()) for plan in plans))
    add("drive time of a step", (f"{drive_seconds(plan, args):.1f} s" for plan in plans))
    console = Console()
    console.print(table)
    for note in _notes(accounts, args):
        console.print(f"- {note}", markup=False, highlight=False)


def _saved(plan: Footprint, reference: Footprint) -> str:
    if plan is reference or not reference.host_bytes:
        return ""
    return f"{math.floor(100 * (1 - plan.host_bytes / reference.host_bytes))} %"


def _notes(accounts: Accounts, args: argparse.Namespace) -> list[str]:
    plan = accounts.memascend
    notes = [
        *time_notes(plan, args),
        "not counted: Python, torch, the device's context, activations, the page cache",
    ]
    if plan.drive[PARAMETERS]:
        notes.insert(
            2,
            "parameters are read in forward and in backward, in each of "
            f"{plan.request.gradient_accumulation_steps} micro-step(s), except those that "
            "stage3_max_reuse_distance keeps on the device between the two",
        )
    if args.config is None:
        notes.insert(0, DEFAULT_NOTE)
    notes += _note_of_packed(accounts.shapes)
    notes += _notes_of_block(accounts.block, accounts.settings)
    if line := advise_muon(accounts.shapes, accounts.settings):
        notes.append(line)
    notes += [
        f"in addition to memascend: {name}: {format_nbytes(n)}" for name, n in plan.not_ours.items()
    ]
    notes += [f"stock: {note}" for note in accounts.stock.notes]
    if plan.tile_numel and not plan.is_tiled:
        notes.append(
            f"{plan.request.optimizer} is not known to work element by element: a tile is a whole "
            "sub-group"
        )
    if plan.checksum_bytes:
        notes.append(
            f"verify {plan.request.verify}: 4 bytes of checksum for each 64 KiB on the drive; keys "
            f"are rounded up to 64 KiB (at most {format_nbytes(plan.drive[ROUNDING])} more on the "
            "drive)"
        )
    notes += _note_of_files(plan.drive_bytes, plan.request.volume_count)
    notes += _note_of_drives(plan)
    notes.append(advise(accounts.shapes, plan))
    notes.append(advise_in_cpu(accounts.shapes, plan))
    micro_batches = accounts.block.micro_batches
    notes.append(advise_one_pass(accounts.shapes, plan, accounts.settings, micro_batches))
    notes.append(
        advise_wear(
            accounts.shapes, plan, accounts.settings, accounts.block, ranks=ranks_of_node(args)
        )
    )
    if args.config is not None:
        notes.append(advise_pinning(accounts.shapes, plan, accounts.settings))
    if plan.limit_bytes is not None:
        notes.append(
            f"limit: {format_nbytes(plan.limit_bytes)} per rank ({plan.limit_bytes} bytes)"
        )
    return [note for note in notes if note]


def _note_of_packed(shapes: ModelShapes) -> list[str]:
    """Return a note if some tensors are not floats, which only checkpoint files show."""
    packed = [tensor for tensor in shapes.tensors if tensor.itemsize is not None]
    if not packed:
        return []
    nbytes = sum(tensor.shard_bytes(1, 0) for tensor in packed)
    return [
        f"{len(packed)} tensor(s) that are not floats ({format_nbytes(nbytes)}) are assumed to be "
        "frozen, all others to be trained"
    ]


def _note_of_files(drive_bytes: int, volume_count: int) -> list[str]:
    """Return a note if a rank's file on one volume is too large for ext4."""
    file_bytes = math.ceil(drive_bytes / volume_count)
    if file_bytes <= EXT4_FILE_BYTES:
        return []
    return [
        f"each rank has a file of {format_nbytes(file_bytes)} on each volume, and ext4 limits a "
        f"file to {format_nbytes(EXT4_FILE_BYTES)}: name "
        f"{math.ceil(drive_bytes / EXT4_FILE_BYTES)} directories in volumes, or use XFS"
    ]


def _note_of_drives(plan: Plan) -> list[str]:
    """Return a note if tiles, staging slots and prefetch are those of several drives."""
    wanted, found = plan.request.drive_count, plan.drive_count
    if wanted == 1:
        return []
    sizes = f"tiles, staging slots and prefetch keep {found} of {wanted} drives busy for each rank"
    return [sizes if found == wanted else f"{sizes}: the limit has no room for more"]


def _notes_of_block(block: MemAscendConfig, settings: DeepSpeedSettings) -> list[str]:
    """Return notes on settings of the JSON that make a run differ from memascend's column."""
    notes = []
    if is_disabled():
        notes.append("MEMASCEND_DISABLE is set: a run would use stock DeepSpeed")
    elif not block.enabled:
        notes.append("memascend.enabled is false: a run would use stock DeepSpeed")
    elif off := sections_off(block):
        notes.append(
            f"memascend's column is for all sections; this JSON turns off: {', '.join(off)}"
        )
    if block.streaming.optimizer.enabled and (reason := why_whole_steps(settings)):
        notes.append(
            f"memascend's column is for steps in tiles, but streaming.optimizer is not used: "
            f"{reason}. Host memory of a run grows with the model"
        )
    if reason := why_not_during_backward(block, settings):
        notes.append(f"streaming.optimizer.during_backward has no effect: {reason}")
    if fewer_bits(block):
        notes.append(f"inexact: {inexactness(block)}")
    return notes


def _as_json(accounts: Accounts, args: argparse.Namespace) -> dict[str, Any]:
    columns = {"stock": accounts.stock, "four_pieces": accounts.four_pieces}
    plans: dict[str, Footprint] = {**columns, "memascend": accounts.memascend}
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
