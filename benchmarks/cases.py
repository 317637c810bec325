"""Cases that run one after the other, each in a process of its own, and leave a file each.

For programs that go on a machine which is only lent for minutes: they list what they would run, run
what is named, stop when their time is up, and go on from there. A child's whole process group ends
with its case. Knows neither devices nor what a case does.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Exit statuses: all is well; something failed; there is more to do; there is no such device.
STATUS_OK, STATUS_FAILED, STATUS_MORE, STATUS_NO_DEVICE = 0, 1, 75, 77
#: A child's answer stands on a line that begins with this.
MARK = "@case"
LOG_BYTES_MAX = 4000
MINUTES = 9.0

DONE, FAILED, NOT_HERE = "done", "failed", "not here"
NO_DEVICE = "no CUDA device was found: nothing was run (exit status 77). --list shows the cases."


@dataclass(frozen=True, slots=True)
class Case:
    """Something to run.

    Attributes:
        name: Also of its file, with other signs for slashes.
        why_not: What this machine lacks for it; empty when it can run.
        variants: It is run once for each, in a process of its own; what it answers is kept by it.
    """

    name: str
    why_not: str = ""
    variants: tuple[str, ...] = ("",)

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
        "--minutes",
        type=float,
        default=MINUTES,
        help=f"stop after so long, with status {STATUS_MORE} if there is more to do",
    )
    arguments.add_argument("--out", type=Path, default=Path(out), help="folder of the records")
    arguments.add_argument(
        "--nvme-path", type=Path, default=Path(), help="folder on the drive (default: .)"
    )
    arguments.add_argument("--child", help=argparse.SUPPRESS)
    arguments.add_argument("--variant", default="", help=argparse.SUPPRESS)
    return arguments


def chosen(cases: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """The named cases, all without a name.

    Raises:
        SystemExit: A name fits none.
    """
    for name in names:
        if not any(fnmatch.fnmatchcase(case.name, name) for case in cases):
            raise SystemExit(f"no case is called {name!r}; --list shows them")
    return [
        case
        for case in cases
        if not names or any(fnmatch.fnmatchcase(case.name, name) for name in names)
    ]


def show(cases: Sequence[Case], out: Path) -> None:
    """Prints each case and where it stands."""
    for case in cases:
        record = load(case, out)
        state = f"not here: {case.why_not}" if case.why_not else "to do"
        print(f"{case.name}: {record['state'] if record and is_settled(record) else state}")


def load(case: Case, out: Path) -> dict[str, Any] | None:
    """The record of a case; None before it was run."""
    file = case.file(out)
    record: dict[str, Any] | None = json.loads(file.read_text()) if file.exists() else None
    return record


def is_settled(record: Mapping[str, Any] | None) -> bool:
    """Whether a case need not be looked at again: what a machine lacks today it may have later."""
    return record is not None and record["state"] != NOT_HERE


def answer(record: Mapping[str, Any]) -> None:
    """Tells the parent; what a child is for."""
    print(MARK, json.dumps(record), flush=True)


def run(
    cases: Sequence[Case],
    program: Path,
    options: argparse.Namespace,
    machine: Mapping[str, Any],
    *,
    child_arguments: Sequence[str] = (),
) -> bool:
    """Runs what has no record, as far as time allows; False when something is left.

    A case that is cut off is left for the next time, unless it had all of the time: then it failed.
    """
    deadline = time.monotonic() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    is_first = True
    for case in cases:
        if is_settled(load(case, options.out)) and not options.again:
            continue
        record: dict[str, Any] = {"name": case.name, "machine": dict(machine)}
        if case.why_not:
            record |= {"state": NOT_HERE, "why": case.why_not}
        else:
            print(f"{case.name} ...", flush=True)
            command = [sys.executable, str(program), "--child", case.name, *child_arguments]
            try:
                answers = {
                    variant: run_child([*command, "--variant", variant], options, deadline)
                    for variant in case.variants
                }
                record |= {"state": DONE, "answers": answers}
            except TimeoutError:
                if not is_first:
                    return False
                record |= {"state": FAILED, "why": f"it took more than {options.minutes:g} minutes"}
            except RuntimeError as error:
                record |= {"state": FAILED, "why": str(error)}
            is_first = False
        case.file(options.out).write_text(json.dumps(record, indent=1) + "\n")
        print(f"{case.name}: {record['state']} {record.get('why', '')}".rstrip(), flush=True)
    return True


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
    """The exit status of a program: a failure is told before what is left."""
    if not is_well:
        return STATUS_FAILED
    return STATUS_OK if is_all else STATUS_MORE


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """Ends what a child has left running, and the child itself."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        child.wait()
