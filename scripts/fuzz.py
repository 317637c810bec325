#!/usr/bin/env python3
"""Fuzzes the readers of headers, manifests and configs with atheris, a target after the other.

Starts from inputs made by code, checks what tests/fuzz/targets.py says, and prints a table for
docs/design/testing.md. An input that crashes, hangs or takes too much memory ends it and is kept in
build/fuzz. `make fuzz FUZZ_ARGS="--inputs 1000000"` is a long run.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.fuzz.targets import TARGETS  # noqa: E402

INPUT_SECONDS_MAX = 10
RSS_MIB_MAX = 1024


@dataclass(frozen=True, slots=True)
class Result:
    """Of one target."""

    inputs: int
    features: int
    corpus: int
    seconds: float


def main() -> int:
    """Runs each target, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="target", help=", ".join(TARGETS))
    parser.add_argument("--inputs", type=int, default=20_000, help="of each target")
    parser.add_argument("--seconds", type=int, default=0, help="at most, of each target; 0: any")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    unknown = [name for name in args.targets if name not in TARGETS]
    if unknown:
        parser.error(f"no target {unknown[0]}; there are {', '.join(TARGETS)}")
    folder = ROOT / "build" / "fuzz"
    results = {}
    for name in args.targets or TARGETS:
        result = fuzz(name, folder, args)
        if result is None:
            return 1
        results[name] = result
    print(table(results, sys.argv[1:]))
    return 0


def fuzz(name: str, folder: Path, args: argparse.Namespace) -> Result | None:
    """Runs one target; None when it found something."""
    corpus = folder / name
    shutil.rmtree(corpus, ignore_errors=True)
    corpus.mkdir(parents=True)
    for index, seed in enumerate(TARGETS[name].seeds()):
        (corpus / f"seed{index}").write_bytes(seed)
    options = [
        *(f"-runs={args.inputs}", f"-max_total_time={args.seconds}", f"-seed={args.seed}"),
        *(f"-timeout={INPUT_SECONDS_MAX}", f"-rss_limit_mb={RSS_MIB_MAX}"),
        *(f"-artifact_prefix={folder}/{name}-", "-print_final_stats=1", str(corpus)),
    ]
    command = [sys.executable, str(ROOT / "tests" / "fuzz" / "run.py"), name, *options]
    started_s = time.monotonic()
    # Files that are only read back belong into memory, where there is such a place.
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="memascend-fuzz-", dir=place) as scratch:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": scratch}
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
    seconds = time.monotonic() - started_s
    if done.returncode != 0:
        print(done.stdout[-8000:])
        print(f"{name}: found something. Repeat: {shlex.join([*command[:3], 'FILE'])}")
        print(f"with the file in {folder}. Then make a unit test of it")
        return None
    inputs = re.search(r"stat::number_of_executed_units:\s*(\d+)", done.stdout)
    states = re.findall(r"ft: (\d+) corp: (\d+)", done.stdout)
    if inputs is None or not states:
        print(f"{done.stdout[-4000:]}\n{name}: atheris said nothing of what it did")
        return None
    result = Result(int(inputs[1]), int(states[-1][0]), int(states[-1][1]), seconds)
    print(f"{name}: {result.inputs} inputs in {seconds:.0f} s, crashes 0", flush=True)
    return result


def table(results: dict[str, Result], words: list[str]) -> str:
    """The results as Markdown, with the command."""
    suffix = f' FUZZ_ARGS="{shlex.join(words)}"' if words else ""
    lines = [
        f"`make fuzz{suffix}`",
        "",
        "| target | inputs | crashes, hangs, wrong answers | features covered | inputs kept | s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, result in results.items():
        lines.append(
            f"| {name} | {result.inputs:,} | 0 | {result.features:,} | {result.corpus:,} "
            f"| {result.seconds:.0f} |"
        )
    lines.append(f"| all | {sum(result.inputs for result in results.values()):,} | 0 | | | |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
