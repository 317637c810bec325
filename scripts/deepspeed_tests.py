#!/usr/bin/env python3
"""Runs DeepSpeed's own tests of NVMe offload twice: as they are, and with memascend's block.

No wheel of DeepSpeed has its tests. They are taken from a checkout, or with --tag from a repository
by git, and copied; DeepSpeed itself is the installed one, or the one on PYTHONPATH:

    scripts/deepspeed_tests.py --tag v0.18.9 https://github.com/deepspeedai/DeepSpeed

A test that passes with stock has to pass with the block; else the status is 1. For both runs the
lines of MENDS are added to the copy. docs/design/testing.md has what was measured.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import compile_operators
from environments import ROOT

FOLDER = ROOT / ".venv" / "deepspeed_tests"
RUNS = {
    "stock": {"MEMASCEND_DISABLE": "1"},
    "block": {"MEMASCEND_DISABLE": "", "MEMASCEND_CONFIG": "{}"},
}
#: Two ranks on a CPU; torch's threads of both would fight over few cores.
VARIABLES = {"LOCAL_SIZE": "2", "OMP_NUM_THREADS": "1"}
SELECTED = "nvme"
ENDINGS = {"failure": "failed", "error": "failed", "skipped": "skipped"}
PASSED, NOT_RUN = ("passed", ""), ("not run", "")
#: Appended to the copy of tests/unit/common.py, which every process imports. DeepSpeed waits for
#: ranks that hang; without a GPU it says that most CPUs have no fp16, though torch computes it, and
#: its tests agree over the ranks by a collective that gloo refuses.
MENDS = """
DistributedExec._close_pool = lambda self, pool, *_, force=False: (
    pool.terminate() if force or not self.reuse_dist_env else None)

if get_accelerator().device_name() == "cpu":
    type(get_accelerator()).is_fp16_supported = lambda self: True

    def reduce_boolean_flags(flag, op=all):
        flags = [None] * dist.get_world_size()
        torch.distributed.all_gather_object(flags, flag)
        return op(flags)
"""
#: Parameters on a drive without an offloaded optimizer use it.
COMPILE = "from deepspeed.ops.op_builder import FusedAdamBuilder; FusedAdamBuilder().load()"
_PROGRESS = re.compile(r"(\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR) +\[ *(\d+%)\]")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

#: How each test ended, and why, where it did not pass.
Outcomes = dict[str, tuple[str, str]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests with stock and with the block, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", help="a checkout of DeepSpeed; with --tag any repository of it")
    parser.add_argument("--tag", help="the release whose tests are cloned, such as v0.18.9")
    parser.add_argument("--timeout", type=int, default=600, help="seconds for one test")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the copy and the logs")
    parser.add_argument("word", nargs="*", help="only files whose paths contain one of these")
    args = parser.parse_intermixed_args(arguments)
    tests = copy_tests(args.source, args.tag, args.folder)
    files = [file for file in selected_files(tests) if any(w in file for w in args.word or [""])]
    if not files:
        parser.error(f"no file below {tests} with tests of {SELECTED} matches {args.word}")
    with (tests / "unit" / "common.py").open("a", encoding="utf-8") as common:
        common.write(MENDS)
    try:
        compile_all()
        results = {name: run_tests(name, tests, files, args.timeout) for name in RUNS}
    except KeyboardInterrupt:
        print("\ninterrupted; everything that was started has ended", flush=True)
        return 128 + signal.SIGINT
    print("", table(results), "", *notes(results), sep="\n")
    ends = by_test(results).values()
    lost = sum(stock == PASSED != block for stock, block in ends)
    print(f"\n{lost} tests pass with stock and not with the block")
    return 1 if lost or not any(stock == PASSED for stock, _ in ends) else 0


def compile_all() -> None:
    """Compile the operators that the tests load: within one it would count as a hang."""
    compile_operators.main()
    print("fused_adam: DeepSpeed compiles it once, for up to minutes", flush=True)
    subprocess.run([sys.executable, "-c", COMPILE], stdout=subprocess.DEVNULL, check=True)


def copy_tests(source: str, tag: str | None, folder: Path) -> Path:
    """Return the folder `tests` of a fresh copy: of a checkout, or of a tag that git clones."""
    for name in ("tests", "clone"):
        shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    if tag is not None:
        clone = folder / "clone"
        words = ("--quiet", "--depth=1", "--filter=blob:none", "--sparse", f"--branch={tag}")
        subprocess.run(["git", "clone", *words, source, str(clone)], check=True)
        subprocess.run(["git", "-C", str(clone), "sparse-checkout", "set", "tests"], check=True)
        source = str(clone)
    return shutil.copytree(Path(source, "tests"), folder / "tests")


def selected_files(tests: Path) -> list[str]:
    """Return the files of tests that train with NVMe offload, as DeepSpeed's own tests name them.

    Tests of the operator async_io alone know no configuration, and would pass or fail alike.
    """
    found = []
    for path in sorted((tests / "unit").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8").lower()
        if SELECTED in text and "zero_optimization" in text:
            found.append(str(path.relative_to(tests)))
    return found


def run_tests(name: str, tests: Path, files: Sequence[str], timeout_s: int) -> Outcomes:
    """Run pytest in the copy, show each test as it ends, and return how all of them ended."""
    report = tests.parent / f"{name}.xml"
    report.unlink(missing_ok=True)
    words = ["-m", "", "-k", SELECTED, "-p", "no:cacheprovider", f"--junitxml={report}"]
    words += [f"--basetemp={tests.parent / 'tmp'}", *files]
    variables = VARIABLES | RUNS[name] | {"DS_UNITTEST_TIMEOUT": str(timeout_s)}
    command = [sys.executable, "-m", "pytest", *words]
    with (
        (tests.parent / f"{name}.log").open("w", encoding="utf-8") as log,
        started(command, tests, variables) as lines,
    ):
        print(f"== {name}: {len(files)} files, log {log.name}", flush=True)
        for line in lines:
            log.write(line)
            if shown := _PROGRESS.search(_COLOURS.sub("", line)):
                print(f"{name} {shown[3]:>4} {shown[2].lower()} {shown[1]}", flush=True)
    return read_report(report)


@contextlib.contextmanager
def started(
    command: Sequence[str], folder: Path, variables: Mapping[str, str]
) -> Iterator[Iterable[str]]:
    """Start a program and give its output by the line; at the end none of its processes is left."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout
    finally:
        # Ranks of a test that hung outlive pytest.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        process.wait()


def read_report(path: Path) -> Outcomes:
    """Return how each test ended, from pytest's report; nothing where there is none.

    A test that hung has no name there, and is left out.
    """
    outcomes: Outcomes = {}
    if not path.exists():
        return outcomes
    for case in ElementTree.parse(path).getroot().iterfind(".//testcase[@classname]"):
        end = PASSED
        for child in case:
            if child.tag in ENDINGS:
                end = ENDINGS[child.tag], child.attrib.get("message", "").partition("\n")[0]
        outcomes[f"{case.attrib['classname']}::{case.attrib['name']}"] = end
    return outcomes


def by_test(results: Mapping[str, Outcomes]) -> dict[str, list[tuple[str, str]]]:
    """Return how each test ended in each run; a hang ends pytest, and leaves the rest out."""
    tests = dict.fromkeys(test for outcomes in results.values() for test in outcomes)
    return {test: [found.get(test, NOT_RUN) for found in results.values()] for test in tests}


def table(results: Mapping[str, Outcomes]) -> str:
    """Return the numbers of tests by class and ending, as Markdown."""
    lines = [f"| tests | {' | '.join(results)} |", "|---" * (len(results) + 1) + "|"]
    kinds: dict[str, list[Counter[str]]] = {}
    for test, ends in by_test(results).items():
        counts = kinds.setdefault(test.partition("::")[0], [Counter() for _ in ends])
        for count, (how, _) in zip(counts, ends, strict=True):
            count[how] += 1
    for kind, counts in kinds.items():
        cells = [", ".join(f"{n} {how}" for how, n in sorted(count.items())) for count in counts]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def notes(results: Mapping[str, Outcomes]) -> list[str]:
    """Return why tests did not pass, and which of them ended in two ways."""
    groups: dict[str, list[str]] = {}
    for test, ends in by_test(results).items():
        parts = [
            f"{run} {how} {why}".strip() for run, (how, why) in zip(results, ends, strict=True)
        ]
        if any(end != PASSED for end in ends):
            differs = len({how for how, _ in ends}) > 1
            groups.setdefault("; ".join(parts), []).extend([test] if differs else [""])
    return [f"{len(tests)} x {why} {' '.join(tests)}".rstrip() for why, tests in groups.items()]


if __name__ == "__main__":
    sys.exit(main())
