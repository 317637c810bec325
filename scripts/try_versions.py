#!/usr/bin/env python3
"""Tries releases of DeepSpeed, torch and transformers, each set in an environment of its own.

In each environment one starts with a block in the configuration; where that is not refused, a few
tests of parity follow. ROWS says what is expected; anything else ends the program with status 1.
docs/versions.md has what was printed.

An environment takes some minutes and, with a CUDA build of torch, about 6 GB; it is removed when
its rows are done. PIP_ARGS are given to every pip. Not part of .ci/run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from environments import ROOT, Environment, build_wheel

from memascend.deepspeed.seams import fingerprints

FOLDER = ROOT / ".venv" / "versions"

#: Titles of the table's columns of releases.
RELEASES = ("DeepSpeed", "torch", "transformers", "Python")
#: What is tried of a release that is not refused, by the test that tries it.
TRIALS = {
    "test_every_section_alone_gives_the_bits_of_cpu_offload": "training",
    "test_training_gives_the_bits_of_cpu_offload": "two ranks",
    "test_a_resumed_run_gives_the_bits_of_one_never_interrupted": "resume",
    "test_steps_during_backward_give_the_bits_of_cpu_offload": "early steps",
    "test_every_kind_of_checkpoint_is_loaded_as_by_stock": "weights",
}
#: One case of each, in pytest's words.
CASES = {
    "training": "every_section_alone and w1 and not sections and not engine",
    "two ranks": "test_training_gives and bf16 and w2",
    "resume": "resumed_run and fp16 and w1",
    "early steps": "during_backward and llama and w1",
    "weights": "every_kind_of_checkpoint",
}
TEST_FILES = ("tests/parity/test_parity.py", "tests/deepspeed/weights/test_pretrained.py")
#: What builds DeepSpeed's source package, and runs the tests and their conftest.py.
TOOLS = (
    *("setuptools>=77", "wheel", "ninja"),
    *("pytest>=8,<9.2", "pytest-timeout", "pytest-xdist>=3.6", "hypothesis", "peft"),
)
WEIGHTS = "weights"
AS_STOCK = "as stock"

#: Run in each environment: begins as a training script does, and prints what came of it.
START = """
import importlib.metadata, json, platform
from deepspeed.runtime.config import DeepSpeedConfig
import transformers.modeling_utils
from memascend.deepspeed.seams import arm, transformers as transformers_seams
from memascend.deepspeed.seams.compare import compare
from memascend.errors import UnsupportedDeepSpeedError

offload = {"device": "nvme", "nvme_path": "/tmp"}
block = {"zero_optimization": {"stage": 3, "offload_optimizer": offload}, "memascend": {}}
refusal = ""
try:
    DeepSpeedConfig({"train_batch_size": 1, **block})
except UnsupportedDeepSpeedError as error:
    refusal = str(error)
names = ("deepspeed", "torch", "transformers")
versions = {name: importlib.metadata.version(name) for name in names}
versions["python"] = platform.python_version()
facts = {"refusal": refusal, "knows_weights": transformers_seams.is_armed(), "versions": versions}
arm.disarm()
print(json.dumps(facts | {"differing": dict(compare().differing)}))
"""


@dataclass(frozen=True)
class Row:
    """Releases that are tried together, and what is expected of them.

    Attributes:
        python: Its version, of which `python3.x` is looked for on the path; empty: this one.
        is_refused: A run with a block ends at its start, because DeepSpeed's code is not known.
        knows_weights: Pretrained weights are loaded our way; else as transformers does it.
        only_weights: Nothing else is tried: the row is there for transformers' loader.
    """

    deepspeed: str
    torch: str = "2.13.0"
    transformers: str = "5.23.0"
    python: str = ""
    is_refused: bool = False
    knows_weights: bool = True
    only_weights: bool = False

    @property
    def environment(self) -> str:
        """The name of the environment; DeepSpeed's releases take turns in it."""
        python = f"-python-{self.python}" if self.python else ""
        return f"torch-{self.torch}-transformers-{self.transformers}{python}"

    @property
    def name(self) -> str:
        """What the words of the command line are looked for in."""
        return f"deepspeed-{self.deepspeed}-{self.environment}"

    @property
    def trials(self) -> list[str]:
        """What is tried once it has started."""
        if self.is_refused:
            return []
        if self.only_weights:
            return [WEIGHTS]
        return [trial for trial in TRIALS.values() if trial != WEIGHTS or self.knows_weights]


NEWEST = fingerprints.VERSIONS[-1]
#: The last release before those that are supported.
REFUSED = "0.18.3"
#: Releases of transformers with another loader than those of the first row and of the oldest.
LOADERS = ("4.57.6", "5.5.4", "5.6.0", "5.22.2")
#: Rows of one environment stand together. The first has what the tests are made with.
ROWS = (
    *(Row(release) for release in reversed(fingerprints.VERSIONS)),
    Row(REFUSED, is_refused=True),
    Row(NEWEST, torch="2.5.0", transformers="4.51.0"),
    Row(NEWEST, transformers="5.24.0"),
    Row(NEWEST, torch="2.15.0", transformers="5.24.0"),
    Row(NEWEST, transformers="5.20.2", python="3.10"),  # the last one for Python 3.10
    *(Row(NEWEST, python=version) for version in ("3.12", "3.13", "3.14")),
    *(Row(NEWEST, transformers=release, only_weights=True) for release in LOADERS),
)


@dataclass(frozen=True)
class Found:
    """What came of a row.

    Attributes:
        versions: The releases installed, by package; empty where nothing started.
        differing: How many definitions of DeepSpeed differ from those known.
        cells: What the table says, by its column.
        problems: What was not as expected.
    """

    versions: dict[str, str]
    differing: int
    cells: dict[str, str]
    problems: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Tries the rows that were asked for and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where environments are made")
    parser.add_argument("--keep", action="store_true", help="environments, for the next time")
    parser.add_argument("--list", action="store_true", help="the names of rows, and try none")
    parser.add_argument("word", nargs="*", help="a row's whole name, or a part of names")
    args = parser.parse_args(arguments)
    rows = chosen(args.word)
    if args.list or not rows:
        print("\n".join(row.name for row in rows or ROWS))
        return 0 if rows else 1
    results: list[tuple[Row, Found]] = []
    try:
        for name, group in groupby(rows, key=lambda row: row.environment):
            try:
                results.extend(try_rows([*group], args.folder / name))
            finally:
                if not args.keep:
                    shutil.rmtree(args.folder / name, ignore_errors=True)
    finally:  # Ctrl-C after an hour leaves the rows of that hour
        print(table(results))
    problems = [f"{row.name}: {problem}" for row, found in results for problem in found.problems]
    print("\n".join(["", *problems]) if problems else "\nall as expected")
    return 1 if problems else 0


def chosen(words: Sequence[str]) -> list[Row]:
    """Returns the rows whose names contain a word; a whole name is its row alone. All without."""
    names = {row.name for row in ROWS}
    alone, parts = set(words) & names, set(words) - names
    return [
        row
        for row in ROWS
        if not words or row.name in alone or any(part in row.name for part in parts)
    ]


def try_rows(rows: Sequence[Row], folder: Path) -> Iterator[tuple[Row, Found]]:
    """Tries the rows of one environment; none where its Python is missing, which the table says."""
    python = find_python(rows[0].python)
    if python is None:
        missing = dict.fromkeys(TRIALS.values(), f"no Python {rows[0].python} here")
        yield from ((row, Found({}, 0, missing, [])) for row in rows)
        return
    try:
        wheel = build_wheel(folder.parent, python)
    except (subprocess.SubprocessError, OSError) as error:
        yield from ((row, nothing(f"no wheel can be built: {error}")) for row in rows)
        return
    environment = Environment(folder, python)
    yield from ((row, try_row(row, environment, wheel)) for row in rows)


def find_python(version: str) -> str | None:
    """Returns the path of a Python that starts; this one's for no version, None without one.

    A shim of pyenv is on the path for versions of which it has none, and fails.
    """
    if not version:
        return sys.executable
    path = shutil.which(f"python{version}")
    if path is None:
        return None
    try:
        words = [path, "--version"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    except (subprocess.SubprocessError, OSError):
        return None
    is_it = done.returncode == 0 and f"{done.stdout.strip()}.".startswith(f"Python {version}.")
    return path if is_it else None


def install(row: Row, environment: Environment, wheel: Path) -> None:
    """Installs a row's releases; what the wheel's own ranges refuse, DeepSpeed alone.

    Raises:
        CalledProcessError: pip failed; the log says why.
    """
    if not environment.is_ready:
        environment.create()
        # DeepSpeed's source package imports torch while it is built.
        environment.install(f"torch=={row.torch}", *TOOLS)
        ranges = (f"{wheel}[finetune]", f"transformers=={row.transformers}")
        environment.install("--no-build-isolation", *ranges, f"deepspeed=={NEWEST}")
        environment.finish()
    environment.exchange_deepspeed(row.deepspeed)


def try_row(row: Row, environment: Environment, wheel: Path) -> Found:
    """Installs a row's releases, then starts and tests it; what fails or hangs is its problem."""
    print(f"== {row.name}", flush=True)
    part = "cannot install it"
    try:
        install(row, environment, wheel)
        part = "cannot be run"
        return try_installed(row, environment)
    except (subprocess.SubprocessError, OSError) as error:
        return nothing(f"{part}: {error}\n{environment.tail()}")


def try_installed(row: Row, environment: Environment) -> Found:
    """Starts with a block, and runs the tests that are expected."""
    started = environment.python("-c", START)
    if started.returncode != 0:
        return nothing(f"cannot start\n{environment.tail()}")
    facts = json.loads(started.stdout.splitlines()[-1])
    problems = compare(row, facts)
    outcomes = {}
    if row.trials and not problems:
        report = environment.folder / "report.xml"
        cases = " or ".join(f"({CASES[trial]})" for trial in row.trials)
        words = ("-q", "-p", "no:cacheprovider", "-m", "not full", "-k", cases)
        environment.python("-m", "pytest", *words, f"--junitxml={report}", *TEST_FILES)
        outcomes = read_report(report)
        lacking = [trial for trial in row.trials if outcomes.get(trial) != "passed"]
        problems += [f"{trial}: {outcomes.get(trial, 'not run')}" for trial in lacking]
        problems += [environment.tail()] if lacking else []
    cells = {trial: outcomes.get(trial, "") for trial in TRIALS.values()}
    if row.trials and not facts["knows_weights"]:
        cells[WEIGHTS] = AS_STOCK
    return Found(facts["versions"], len(facts["differing"]), cells, problems)


def nothing(problem: str) -> Found:
    """Returns what came of a row that did not even start."""
    return Found({}, 0, dict.fromkeys(TRIALS.values(), ""), [problem])


def compare(row: Row, facts: dict[str, object]) -> list[str]:
    """Returns what of the start is not as the row expects it."""
    problems = []
    if bool(facts["refusal"]) != row.is_refused:
        expected = "a refusal" if row.is_refused else "none"
        problems.append(f"expected {expected}, found: {facts['refusal'] or 'none'}")
    if not row.is_refused and facts["knows_weights"] != row.knows_weights:
        problems.append(f"expected knows_weights={row.knows_weights}")
    return problems


def read_report(path: Path) -> dict[str, str]:
    """Returns how each trial ended, from pytest's report; what was skipped is no pass."""
    outcomes: dict[str, str] = {}
    if not path.exists():
        return outcomes
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        trial = TRIALS.get(case.attrib["name"].partition("[")[0])
        ended = {child.tag for child in case} & {"failure", "error", "skipped"}
        if trial is not None and outcomes.get(trial, "passed") == "passed":
            outcomes[trial] = ", ".join(sorted(ended)) or "passed"
    path.unlink()
    return outcomes


def table(results: Iterable[tuple[Row, Found]]) -> str:
    """Returns the results as Markdown; rows that differ in one release alone are one."""
    titles = (*RELEASES, "at the start", *TRIALS.values())
    rows: list[list[str]] = []
    for row, found in results:
        wanted = {"torch": row.torch, "transformers": row.transformers, "python": row.python}
        names = [found.versions.get(name, version) for name, version in wanted.items()]
        start = "refused" if row.is_refused else "armed"
        if row.is_refused:
            start += f": {found.differing} definitions differ"
        if not found.versions:
            start = "fails" if found.problems else "not run"
        rows.append([row.deepspeed, *names, start, *found.cells.values()])
    lines = [" | ".join(cells) for cells in joined(rows)]
    head = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    return "\n".join([*head, *(f"| {line} |" for line in lines)])


def joined(rows: Iterable[Sequence[str]]) -> list[list[str]]:
    """Returns rows in which one cell has several releases where neighbours differ in it alone."""
    lines: list[list[str]] = []
    column = None  # in which the last line is joined
    for cells in rows:
        last = lines[-1] if lines else []
        differing = [n for n, pair in enumerate(zip(last, cells, strict=False)) if len({*pair}) > 1]
        if len(differing) == 1 and differing[0] < len(RELEASES) and column in (None, differing[0]):
            [column] = differing
            last[column] += f", {cells[column]}"
        else:
            lines.append([*cells])
            column = None
    return lines


if __name__ == "__main__":
    sys.exit(main())
