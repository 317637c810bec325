#!/usr/bin/env python3
"""The soak (tests/cpp/soak) for a stated time, half of it under each sanitizer.

It ends at the first thing that is wrong and prints how to repeat that round; otherwise it prints a
table for docs/design/testing.md. `make soak SOAK_ARGS="--seconds 3600 --seed 7"` is an hour of it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import test_cpp

SOAK = Path("tests/cpp/soak/soak_test.cpp")
DEFAULT = ("address", "thread")
GRACE_S = 600  # beyond the stated time, before a run that does not end is given up
# The rows of the table, in its order; a name with several parts is their sum.
ROWS = {
    "seconds": ("seconds",),
    "rounds, each with its own volumes, engine and limits": ("rounds",),
    "stores opened and closed": ("stores",),
    "operations": ("operations",),
    "writes": ("writes",),
    "reads": ("reads",),
    "blocks lent to transfers": ("lent_blocks",),
    "bytes read and compared": ("checked_bytes",),
    "injected: short transfers": ("short_transfers",),
    "injected: EAGAIN, EINTR": ("again",),
    "injected: EIO": ("eio",),
    "injected: ENOSPC": ("enospc",),
    "injected: bits turned in reads": ("flips",),
    "injected: completions out of order": ("reordered",),
    "injected: delays, silent volumes": ("delayed", "pauses"),
    "met: transfers that failed": ("failed_transfers",),
    "met: reads refused after a failed write": ("refused_reads",),
    "met: full volumes": ("full_volumes",),
    "met: the memory limit": ("memory_limits",),
    "**losses**": ("losses",),
    "**leaked blocks**": ("leaked_blocks",),
}


def main() -> int:
    """Builds, runs under each sanitizer, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="in all; default 60")
    parser.add_argument("--seed", type=int, default=1, help="of the first round; default 1")
    parser.add_argument("--rounds", type=int, help="at most so many under each sanitizer")
    parser.add_argument(
        "--engine", default="all", choices=["all", "memory", "uring", "libaio", "threads"]
    )
    parser.add_argument("--san", action="append", choices=list(test_cpp.SANITIZERS))
    parser.add_argument("--directory", help="of the volumes that are files; default: a new one")
    args = parser.parse_args()
    os.chdir(test_cpp.ROOT)
    sanitizers = args.san or list(DEFAULT)
    results = {}
    for sanitizer in sanitizers:
        program = test_cpp.build_tests([SOAK], sanitizer, os.cpu_count() or 1)[SOAK]
        with tempfile.TemporaryDirectory(prefix="soak-", dir="build") as folder:
            words = [*("--seconds", str(args.seconds / len(sanitizers))), "--engine", args.engine]
            words += ["--seed", str(args.seed), "--directory", args.directory or folder]
            words += ["--rounds", str(args.rounds)] if args.rounds else []
            result = soak(program, sanitizer, words, args.seconds + GRACE_S)
        if result is None:
            print(f"the soak failed under {sanitizer}")
            return 1
        results[sanitizer] = result
    print(table(results, [*sys.argv[1:]]))
    return 0


def soak(
    program: Path, sanitizer: str, words: list[str], timeout_s: float
) -> dict[str, int] | None:
    """Runs it; what it counted, or None when something was wrong."""
    command = [*test_cpp.command_of(program, sanitizer), *words]
    print(f"== {sanitizer}: {shlex.join(command)}", flush=True)
    options = "halt_on_error=1:second_deadlock_stack=1"
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "TSAN_OPTIONS": os.environ.get("TSAN_OPTIONS", options)},
    )
    print(done.stdout, end="", flush=True)
    if done.returncode != 0:
        return None
    counts = {}
    for line in done.stdout.splitlines():
        name, _, value = line.rpartition(" ")
        if value.isdigit():
            counts[name.strip()] = int(value)
    return counts


def table(results: dict[str, dict[str, int]], words: list[str]) -> str:
    """The results as Markdown, with the command."""
    lines = [
        f'`make soak SOAK_ARGS="{shlex.join(words)}"`',
        "",
        f"| | {' | '.join(results)} |",
        f"|---|{'---:|' * len(results)}",
    ]
    for title, names in ROWS.items():
        cells = [f"{sum(counts[name] for name in names):,}" for counts in results.values()]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
