"""Where the host waits in a step: for the emulated device, and for the drive.

    python -m tests.device.waits --variant bf16 --mode "no limit" --seed 2

prints how often and how long by reason and place, to compare memascend before and after a change. A
step is what a run of five steps waits more than one of three, divided by two. The times say where
the host waits, not how long it would on a GPU: delays are random, not by size.
"""

from __future__ import annotations

import argparse
import ast
import functools
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

from tests.device.emulator.drive import Wait
from tests.device.trials import MODES, SECTION_MODES, VARIANTS, Trial
from tests.parity.workers import Bench

ROOT = Path(__file__).resolve().parents[2]
STEPS = (3, 5)
SHOWN_MS_MIN = 0.1
#: A place has a few frames: who is called in backward, and for a slot there and elsewhere.
PUTTING = (
    *("stream._replace", "stream._add_up", "stream._target", "accumulation.add_up"),
    *("staging.read_each", "staging.turn", "staging.take", "on_device._wait_for_room"),
)


def place_in_memascend(place: str) -> str:
    """Shorten a place to the innermost frame of memascend, or else of whoever waits."""
    frames = place.split(" < ")
    return next((frame for frame in frames if frame.startswith("memascend/")), frames[0])


@functools.cache
def functions_in(file: str) -> list[tuple[int, int, str]]:
    """Return first line, last line and name of a file's functions, the innermost last."""
    if not (ROOT / file).is_file():
        return []
    nodes = ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
    found = [
        (node.lineno, node.end_lineno or node.lineno, node.name)
        for node in nodes
        if isinstance(node, ast.FunctionDef)
    ]
    return sorted(found)


def functions_of(place: str) -> list[str]:
    """Return the functions of memascend in a place, as "staging.take", the innermost first."""
    found = []
    for frame in place.split(" < "):
        file, _, line = frame.rpartition(":")
        names = [
            name for first, last, name in functions_in(file) if first <= int(line or 0) <= last
        ]
        if file.startswith("memascend/") and names:
            found.append(f"{Path(file).stem}.{names[-1]}")
    return found


def device_waits_of_gradients(rows: list[Wait]) -> dict[str, float]:
    """Return how often in a step the host waits for the device to take a gradient, by functions."""
    counts: Counter[str] = Counter()
    for why, place, count, _ in rows:
        functions = functions_of(place)
        if why != "drive" and any(name in PUTTING for name in functions):
            counts[" < ".join(functions)] += count
    return {names: count for names, count in counts.items() if count}


def waits_per_step(bench: Bench, trial: Trial, seed: int, *, whole: bool) -> list[Wait]:
    """Run a trial twice; return what the additional steps waited, the longest first.

    `whole` tells a place with its callers.
    """
    counts: Counter[tuple[str, str]] = Counter()
    times: Counter[tuple[str, str]] = Counter()
    for steps, sign in zip(STEPS, (-1, 1), strict=True):
        case = replace(trial.case, steps=steps)
        how = trial.how
        facts = bench.run(case, how.backend, seed=seed, **how.options)
        for why, place, count, milliseconds in facts[0]["waits"]:
            key = why, place if whole else place_in_memascend(place)
            counts[key] += sign * count
            times[key] += sign * milliseconds
    per_step = STEPS[1] - STEPS[0]
    rows = [(*key, counts[key] / per_step, times[key] / per_step) for key in counts]
    return sorted(rows, key=lambda row: -row[3])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=VARIANTS, default="bf16")
    parser.add_argument("--mode", choices=MODES | SECTION_MODES, default="no limit")
    parser.add_argument("--seed", type=int, default=2, help="of random delays; 0 has none")
    parser.add_argument("--whole", action="store_true", help="show the callers, too")
    arguments = parser.parse_args()
    trial = Trial(arguments.variant, arguments.mode)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), "tests.device.worker")
        try:
            rows = waits_per_step(bench, trial, arguments.seed, whole=arguments.whole)
        finally:
            bench.stop()
    print(f"{trial.name}, seed {arguments.seed}; in a step the host waits")
    for why, place, count, milliseconds in rows:
        if milliseconds < SHOWN_MS_MIN:
            continue
        print(f"{count:8.1f} times {milliseconds:9.1f} ms  {why:16} {place}")


if __name__ == "__main__":
    main()
