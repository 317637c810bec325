"""`memascend compare -- COMMAND`: the user's own launch command with memascend off and on.

Wires warm-up, runs and report together; each of these lives in a file of its own.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from memascend.base.charts import why_none
from memascend.base.json_text import parse_json
from memascend.base.units import format_nbytes
from memascend.cli.compare import report as compare_report
from memascend.cli.compare.activity import activity
from memascend.cli.compare.page import write_page
from memascend.cli.compare.report import Report
from memascend.cli.compare.run import (
    Column,
    Run,
    child_environment,
    columns_by_name,
    run_column,
)
from memascend.cli.compare.trainer_state import output_folders, read_all_digits, use_all_digits
from memascend.cli.compare.warm_up import WarmUp, warm_up
from memascend.config.deepspeed import parse_deepspeed
from memascend.errors import ConfigError, UnsupportedDeepSpeedError

EPILOG = """\
example:
  memascend compare --out compare-out -- \\
      deepspeed --num_gpus 1 scripts/finetune.py --deepspeed_config configs/nvme_cpu.json

The same command runs once per column, or with --repeat several times, in turns. For the stock
columns memascend is switched off, even if the configuration has it on; for the other, a
configuration without a "memascend" block gets an empty one.
Exit status: 0 when every run succeeded and printed the same losses, 1 otherwise."""


@dataclass(frozen=True, slots=True)
class Target:
    """The facts about the run that the command's own arguments show."""

    config: dict[str, Any] | None  # the DeepSpeed configuration, None when no argument is one
    folders: tuple[Path, ...]  # where it offloads to
    outputs: tuple[Path, ...] = ()  # where a Trainer writes its state

    @property
    def has_block(self) -> bool:
        """True when the configuration has a memascend block of its own."""
        return self.config is not None and "memascend" in self.config


def compare_command_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "compare",
        help="run a launch command with memascend off and on, and compare",
        description="Run a launch command with memascend off and on, and compare.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("compare-out"), help="folder for results")
    parser.add_argument(
        "--columns",
        default="stock,memascend",
        help="what to run, in this order, separated by commas: stock, memascend, stock-tuned",
    )
    parser.add_argument(
        "--tuned",
        action="store_true",
        help="add stock-tuned: stock with the exact page-locking that it has behind variables",
    )
    parser.add_argument(
        "--repeat",
        type=int,
        default=1,
        metavar="N",
        help="run every column N times, in turns, and show median and range",
    )
    parser.add_argument("--nvme-path", type=Path, help="where it offloads to, if not in its JSON")
    parser.add_argument("--interval-ms", type=int, default=50, help="time between memory samples")
    parser.add_argument(
        "--keep-going",
        action="store_true",
        help="run the other columns after one has failed, such as stock that runs out of memory",
    )
    parser.add_argument(
        "--no-warm-up",
        action="store_true",
        help="neither build DeepSpeed's operators first nor measure the import baseline",
    )
    parser.add_argument(
        "command", nargs="+", metavar="COMMAND", help="the launch command, after --"
    )
    parser.set_defaults(run=compare_command, fail=parser.error)


def compare_command(args: argparse.Namespace) -> int:
    """Run every column, write the report and return the exit status."""
    # The output of other programs is shown as it is, in lines that a log may keep.
    console = Console(markup=False, highlight=False, soft_wrap=True)
    command: list[str] = args.command
    target = read_target(command, args.nvme_path)
    columns = _columns(args, target)
    for name, number in (("--repeat", args.repeat), ("--interval-ms", args.interval_ms)):
        if number < 1:
            args.fail(f"{name} {number} is not allowed. Allowed: a whole number of at least 1")
    _check_command(command)
    _provide_folder(args.out)
    if reason := why_none():
        console.print(f"report.html will have no charts: {reason}", style="yellow")
    found = WarmUp() if args.no_warm_up else show_warm_up(console, args.out)
    if found.refusal and any(column.name == "memascend" for column in columns):
        raise UnsupportedDeepSpeedError(found.refusal)  # before hours of stock's run
    skipped = _skipped(found, target, columns)
    runs = _run_all(console, [c for c in columns if c.name not in skipped], target, args)
    use_all_digits(runs)
    report = Report(command, found.baseline_bytes, runs, skipped, target.config or {})
    for text in compare_report.failures(report):
        console.print(text, style="red")
    for name, reason in skipped.items():
        console.print(f"{name} was left out: {reason}", style="yellow")
    if report.complete:
        console.print(compare_report.table(report), soft_wrap=False)
    if len(runs) < args.repeat * (len(columns) - len(skipped)):
        console.print(
            "stopped at the first failure: --keep-going runs the other columns, --columns "
            "memascend leaves stock out",
            style="yellow",
        )
    try:
        compare_report.write_json(report, args.out / "report.json")
        write_page(report, args.out / "report.html")
    except OSError as error:
        raise _unusable(args.out, error) from error
    console.print(f"{args.out}/report.html, for a browser; report.json and logs are beside it")
    return report.exit_status


def _run_all(
    console: Console, columns: Sequence[Column], target: Target, args: argparse.Namespace
) -> list[Run]:
    """Run every column as often as asked, until one fails unless --keep-going is given.

    Several runs take turns, so that other load of the machine affects all columns alike.
    """
    runs: list[Run] = []
    for number in range(1, args.repeat + 1) if args.repeat > 1 else [0]:
        for column in columns:
            runs.append(_run(console, column, number, args.command, target, args))
            if runs[-1].problem and not args.keep_going:
                return runs
    return runs


def _check_command(command: Sequence[str]) -> None:
    """Raise ConfigError for a program or a DeepSpeed JSON that does not exist."""
    if not find_program(command[0]):
        raise ConfigError(
            f"{command[0]!r} is not a program: it is neither on the PATH nor an executable file. "
            "The launch command comes after --, as in: memascend compare -- deepspeed train.py"
        )
    words = [part for word in command for part in _split_option(word)]
    for option, word in pairwise(words):
        is_named = option.startswith("-") and "deepspeed" in option and word.endswith(".json")
        if is_named and not Path(word).is_file():
            raise ConfigError(
                f"{option} {word}: no such file in {Path.cwd()}. `memascend config --nvme-path "
                f"/mnt/ssd > {word}` writes one"
            )


def find_program(name: str) -> str | None:
    """Return the path of a program as the runs will find it; None without one."""
    return shutil.which(name, path=child_environment({})["PATH"])


def _provide_folder(folder: Path) -> None:
    """Make the folder for results, before hours of runs."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _unusable(folder, error) from error


def _unusable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"--out {folder}: results cannot be written there: {error.strerror}. Name a folder that "
        "this user can write, with room for the logs of all runs"
    )


def read_target(command: Sequence[str], nvme_path: Path | None = None) -> Target:
    """Look through the command's arguments for a DeepSpeed configuration and offload folders.

    A folder named on a command line, ours first, goes before those that the configuration names.

    Raises:
        ConfigError: The configuration has something else where an object or a device belongs.
    """
    config: dict[str, Any] | None = None
    named = [] if nvme_path is None else [nvme_path]
    words = [part for word in command for part in _split_option(word)]
    for before, word in pairwise(["", *words]):
        if before in ("--nvme-path", "--nvme_path"):
            named.append(Path(word))
        elif word.endswith(".json") and config is None:
            config = _deepspeed_config(Path(word))
    zero = parse_deepspeed(config).zero_optimization
    configured = [
        Path(part.nvme_path)
        for part in (zero.offload_param, zero.offload_optimizer)
        if part.device == "nvme" and part.nvme_path
    ]
    return Target(config, tuple(dict.fromkeys(named[:1] or configured)), output_folders(words))


def _split_option(word: str) -> list[str]:
    """Split "--option=value"; anything else stays whole."""
    option, equals, value = word.partition("=")
    return [option, value] if word.startswith("-") and equals else [word]


def _deepspeed_config(path: Path) -> dict[str, Any] | None:
    try:
        content = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and "zero_optimization" in content else None


def _columns(args: argparse.Namespace, target: Target) -> list[Column]:
    known = columns_by_name(config_has_block=target.has_block)
    names = args.columns.split(",") + (["stock-tuned"] if args.tuned else [])
    unknown = [name for name in names if name not in known]
    if unknown:
        args.fail(f"unknown column {unknown[0]!r}. Known: {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)]


def show_warm_up(console: Console, out: Path) -> WarmUp:
    """Compile DeepSpeed's operators and measure the import baseline, with progress."""
    news = ["starting"]

    def hear(text: str) -> None:
        if text:
            news[0] = text
            if not console.is_terminal:
                console.print(f"  {text}")

    log = out / "warm-up.log"
    with activity(console, "warm-up", lambda: news[0]):
        found = warm_up(log, hear)
    if found.problem:
        tail = compare_report.log_tail(log)
        console.print(f"warm-up failed: {found.problem}\n{tail}", style="yellow")
    return found


def _skipped(found: WarmUp, target: Target, columns: Sequence[Column]) -> dict[str, str]:
    """Name the stock columns when DeepSpeed's own I/O cannot be had and the run needs it."""
    reason = found.unavailable.get("AsyncIOBuilder")
    is_nvme = target.config is None or bool(target.folders)
    if reason is None or not is_nvme:
        return {}
    text = (
        f"DeepSpeed's async_io operator cannot be built here: {reason}. Likely cause: libaio or a "
        "C++ compiler is missing. Install with: apt-get install libaio-dev g++"
    )
    return {column.name: text for column in columns if column.name.startswith("stock")}


class _LiveColumn:
    """The latest news of the run that is going on, in one line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._run: Run | None = None
        self._loss_count = 0
        self._loss_line = ""

    def hear(self, run: Run, line: str) -> None:
        self._run = run
        if len(run.losses) > self._loss_count:
            self._loss_count, self._loss_line = len(run.losses), line[:100]
            if not self._console.is_terminal:
                self._console.print(f"  {line}")

    def detail(self) -> str:
        """Return the resident memory now and the last line with a loss."""
        if self._run is None or not self._run.samples:
            return ""
        rss = format_nbytes(self._run.samples[-1].total_rss_bytes)
        return f"RSS {rss}  {self._loss_line}"


def _run(
    console: Console,
    column: Column,
    number: int,
    command: Sequence[str],
    target: Target,
    args: argparse.Namespace,
) -> Run:
    live = _LiveColumn(console)
    title = f"{column.name} {number} of {args.repeat}" if number else column.name
    log = f"{column.name}-{number}.log" if number else f"{column.name}.log"
    with activity(console, f"{title}: running the command", live.detail):
        run = run_column(
            column,
            command,
            log=args.out / log,
            folders=target.folders,
            interval_s=args.interval_ms / 1000,
            on_line=live.hear,
            number=number,
        )
    read_all_digits(run, target.outputs)
    outcome = f"failed: {run.problem}" if run.problem else "done"
    console.print(f"{title}: {outcome} after {run.elapsed_s:.1f} s")
    return run
