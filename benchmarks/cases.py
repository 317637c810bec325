"""Cases that run one after the other, each in a process of its own, and leave a file each.

For programs that go on a machine which is only lent for minutes: they list what they would run, run
what is named, stop before their time is up, and continue from there. All records fit one file, from
which another machine continues. A child's whole process group ends with its case. Knows neither
devices nor what a case does.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Exit statuses: all is well; something failed; there is more to do; there is no such device.
STATUS_OK, STATUS_FAILED, STATUS_MORE, STATUS_NO_DEVICE = 0, 1, 75, 77
#: A child's answer stands on a line that begins with this.
MARK = "@case"
#: The only key of a child's answer if the machine lacks something that the case needs.
LACKS = "lacks"
#: A case that had this share of the time has had all of it.
WHOLE_SHARE = 0.8
LOG_BYTES_MAX = 4000
MINUTES = 9.0

DONE, FAILED, NOT_HERE = "done", "failed", "not here"
NO_DEVICE = "no CUDA device was found: nothing was run (exit status 77). --list shows the cases."


class Lack(Exception):
    """The machine lacks something that a case needs: the case is not here, and has not failed."""


@dataclass(frozen=True, slots=True)
class Case:
    """Something to run.

    Attributes:
        name: Also of its file, with other signs for slashes.
        why_not: What this machine lacks for it; empty when it can run.
        variants: It is run once for each, in a process of its own; what it answers is kept by it.
        seconds: Estimated duration of all variants: it does not begin with less time left.
    """

    name: str
    why_not: str = ""
    variants: tuple[str, ...] = ("",)
    seconds: float = 0.0

    def file(self, folder: Path) -> Path:
        """Where its record is kept."""
        return folder / f"{self.name.replace('/', '--')}.json"


def parser(description: str, *, out: str) -> argparse.ArgumentParser:
    """The arguments of every program with cases."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("names", nargs="*", help="only these cases; '*' and '?' as in a shell")
    arguments.add_argument("--list", action="store_true", help="list the cases, and run nothing")
    arguments.add_argument("--render", action="store_true", help="write the report, run nothing")
    arguments.add_argument("--again", action="store_true", help="also what has a record already")
    arguments.add_argument(
        "--first", default="", metavar="A,B", help="run these before the others, in this order"
    )
    arguments.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        help=f"stop after so long, with status {STATUS_MORE} if there is more to do",
    )
    arguments.add_argument(
        "--spent", type=float, default=0.0, help="seconds of --minutes that are over already"
    )
    arguments.add_argument("--out", type=Path, default=Path(out), help="folder of the records")
    arguments.add_argument(
        "--results", type=Path, help="one file of all records: read at the start, kept up to date"
    )
    arguments.add_argument(
        "--nvme-path", type=Path, default=Path(), help="folder on the drive (default: .)"
    )
    arguments.add_argument("--child", help=argparse.SUPPRESS)
    arguments.add_argument("--variant", default="", help=argparse.SUPPRESS)
    return arguments


def chosen(cases: Sequence[Case], names: Sequence[str], first: str = "") -> list[Case]:
    """Return the named cases, or all without a name, those of `first` before the others.

    Raises:
        SystemExit: A name fits none.
    """
    order = [name for name in first.split(",") if name]
    for name in (*names, *order):
        if not any(fnmatch.fnmatchcase(case.name, name) for case in cases):
            raise SystemExit(f"no case is called {name!r}; --list shows them")
    wanted = [
        case
        for case in cases
        if not names or any(fnmatch.fnmatchcase(case.name, name) for name in names)
    ]
    begin = [case for name in order for case in wanted if fnmatch.fnmatchcase(case.name, name)]
    return list(dict.fromkeys([*begin, *wanted]))


def show(cases: Sequence[Case], out: Path) -> None:
    """Prints each case and where it stands."""
    for case in cases:
        record = load(case, out)
        state, why = ("not here", case.why_not) if case.why_not else ("to do", "")
        if record is not None and is_settled(record):
            state, why = record["state"], record.get("why", "")
        print(f"{case.name}: {state}{': ' * bool(why)}{why}")


def load(case: Case, out: Path) -> dict[str, Any] | None:
    """The record of a case; None before it was run."""
    file = case.file(out)
    record: dict[str, Any] | None = json.loads(file.read_text()) if file.exists() else None
    return record


def is_settled(record: Mapping[str, Any] | None) -> bool:
    """Whether a case need not run again: a lack that is known without running it may have gone."""
    return record is not None and (record["state"] != NOT_HERE or "answers" in record)


def answer(measure: Callable[[], Mapping[str, Any]]) -> None:
    """Measure and tell the parent the figures, or what the machine lacks: what a child is for."""
    try:
        record = measure()
    except Lack as lack:
        record = {LACKS: str(lack)}
    print(MARK, json.dumps(record), flush=True)


# -- one file of all records --------------------------------------------------------------------


def unpack(options: argparse.Namespace) -> None:
    """Put the records of --results into --out, except those that are there already."""
    if options.results is None or not options.results.exists():
        return
    options.out.mkdir(parents=True, exist_ok=True)
    for name, record in json.loads(options.results.read_text(encoding="utf-8"))["records"].items():
        file = options.out / Path(name).name
        if not file.exists():
            file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def pack(options: argparse.Namespace, page: str = "") -> None:
    """Write --results: the page, and every record of --out. A kill leaves the old file whole."""
    if options.results is None:
        return
    found = {
        file.name: json.loads(file.read_text(encoding="utf-8"))
        for file in sorted(options.out.glob("*.json"))
    }
    records = {name: record for name, record in found.items() if "state" in record}
    text = json.dumps({"page": page.splitlines(), "records": records}, indent=1) + "\n"
    options.results.parent.mkdir(parents=True, exist_ok=True)
    new = options.results.with_name(options.results.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(options.results)


# -- running ------------------------------------------------------------------------------------


def run(
    cases: Sequence[Case],
    program: Path,
    options: argparse.Namespace,
    machine: Mapping[str, Any],
    *,
    child_arguments: Sequence[str] = (),
) -> bool:
    """Run the cases without a record, as far as time allows; return False if something is left.

    A case that is cut off is left for the next time, unless it had all of the time: then it failed.
    """
    budget_s = 60 * options.minutes
    deadline = time.monotonic() + budget_s - options.spent
    options.out.mkdir(parents=True, exist_ok=True)
    is_all, is_first = True, True
    for case in cases:
        if is_settled(load(case, options.out)) and not options.again:
            continue
        record: dict[str, Any] = {"name": case.name, "machine": dict(machine)}
        left_s = deadline - time.monotonic()
        has_all = is_first and left_s >= WHOLE_SHARE * budget_s
        if case.why_not:
            record |= {"state": NOT_HERE, "why": case.why_not}
        elif not has_all and left_s <= case.seconds:
            print(f"{case.name}: left, it takes about {case.seconds:.0f} s", flush=True)
            is_all = False
            continue
        else:
            print(f"{case.name} ...", flush=True)
            command = [sys.executable, str(program), "--child", case.name, *child_arguments]
            try:
                record |= _run_variants(case, command, options, deadline)
            except TimeoutError:
                if not has_all:
                    return False
                record |= {"state": FAILED, "why": f"it took more than {left_s / 60:.1f} minutes"}
            except RuntimeError as error:
                record |= {"state": FAILED, "why": str(error)}
            is_first = False
        case.file(options.out).write_text(json.dumps(record, indent=1) + "\n")
        pack(options)
        print(f"{case.name}: {record['state']} {record.get('why', '')}".rstrip(), flush=True)
    return is_all


def _run_variants(
    case: Case, command: Sequence[str], options: argparse.Namespace, deadline: float
) -> dict[str, Any]:
    """Run one variant after the other, until one lacks something; return their part of a record."""
    found: dict[str, Any] = {"state": DONE, "answers": {}, "seconds": {}}
    for variant in case.variants:
        started_s = time.monotonic()
        answers = run_child([*command, "--variant", variant], options, deadline)
        found["answers"][variant] = answers
        found["seconds"][variant] = round(time.monotonic() - started_s, 1)
        if LACKS in answers:
            return found | {"state": NOT_HERE, "why": answers[LACKS]}
    return found


def run_child(
    command: Sequence[str], options: argparse.Namespace, deadline: float
) -> dict[str, Any]:
    """One child: its answer. Whatever it has started ends with it, and its folder goes.

    Raises:
        TimeoutError: The deadline came first.
        RuntimeError: It gave no answer; the message has the end of what it printed.
    """
    with tempfile.TemporaryDirectory(dir=options.nvme_path, prefix="gpu-") as folder:
        log = Path(folder) / "log"
        with log.open("w") as output:
            child = subprocess.Popen(
                [*command, "--nvme-path", folder, "--out", str(options.out.absolute())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            status = child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        finally:
            _end_group(child)
        text = log.read_text(errors="replace")
    answers = [line for line in text.splitlines() if line.startswith(MARK)]
    if status != 0 or len(answers) != 1:
        raise RuntimeError(
            f"it ended with status {status} and {len(answers)} answers:\n{text[-LOG_BYTES_MAX:]}"
        )
    found: dict[str, Any] = json.loads(answers[0].removeprefix(MARK))
    return found


def status(*, is_all: bool, is_well: bool) -> int:
    """The exit status of a program. Callers start it again while it is STATUS_MORE.

    So a failure is reported by the status of the last call, after everything has run.
    """
    if not is_all:
        return STATUS_MORE
    return STATUS_OK if is_well else STATUS_FAILED


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """Ends what a child has left running, and the child itself."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        child.wait()
