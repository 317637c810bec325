"""Several processes on one drive, each with a store of its own: does one get less than another?

The parent of `rank_program.py`. All move the same amount at once; whoever gets a smaller share of
the drive ends later. The others are faster once the first is done, so the ratio of the times says
less than that of the shares; it is 1 when all are served alike.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness

PROGRAM = Path(__file__).with_name("rank_program.py")
VERBS = ("read", "write")


class Ranks:
    """Processes that wait for the word to move what they have."""

    def __init__(self, directory: Path, *, count: int, nbytes: int) -> None:
        command = [sys.executable, str(PROGRAM), "--directory", str(directory)]
        command += ["--nbytes", str(nbytes)]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(count)
        ]

    def answers(self) -> list[dict[str, Any]]:
        """One line of each; raises when a process has ended instead."""
        found = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"a rank ended with status {process.wait()}; see its messages")
            found.append(json.loads(line))
        return found

    def move(self, verb: str) -> list[float]:
        """Has all of them move what they have at once; gives the seconds that each one took."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{verb}\n")
            process.stdin.flush()
        return seconds_of(self.answers())

    def stop(self) -> None:
        """Ends them."""
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            process.wait()


@contextmanager
def started(directory: Path, *, count: int, nbytes: int) -> Iterator[Ranks]:
    """Processes that are ready, and end with the block."""
    ranks = Ranks(directory, count=count, nbytes=nbytes)
    try:
        ranks.answers()
        yield ranks
    finally:
        ranks.stop()


def seconds_of(answers: Sequence[dict[str, float]]) -> list[float]:
    """From when the first began until each one ended."""
    began = min(answer["began"] for answer in answers)
    return [answer["ended"] - began for answer in answers]


def figures(rounds: Sequence[Sequence[float]], nbytes: int) -> dict[str, Any]:
    """Of all rounds: the times by place, the fastest first, and the slowest one's by the fastest's.

    Who is slow may change from round to round, so the ratio is taken within each.
    """
    ordered = [sorted(seconds) for seconds in rounds]
    places = zip(*ordered, strict=True)
    found: dict[str, Any] = {
        f"{place}_s": harness.spread(taken) for place, taken in enumerate(places, start=1)
    }
    found["slowest_to_fastest"] = harness.spread([taken[-1] / taken[0] for taken in ordered])
    total = [len(taken) * nbytes / taken[-1] / 1e9 for taken in ordered]
    found["gb_per_s"] = harness.spread(total)
    found["slowest_rank"] = [list(taken).index(max(taken)) for taken in rounds]
    return found


def measure(
    directory: Path, *, count: int, nbytes: int, rounds: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the figures of reads and of writes; the first round of each is not counted."""
    with started(directory, count=count, nbytes=nbytes) as ranks:
        taken: dict[str, list[list[float]]] = {verb: [] for verb in VERBS}
        for _ in range(1 + rounds):
            for verb in VERBS:
                taken[verb].append(ranks.move(verb))
    for verb in VERBS:
        yield verb, figures(taken[verb][1:], nbytes)
