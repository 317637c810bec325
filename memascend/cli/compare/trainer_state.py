"""Losses with every digit from the file that the Hugging Face Trainer leaves behind.

The Trainer prints four digits of a loss, and writes all of them to trainer_state.json.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from memascend.base.json_text import parse_json
from memascend.cli.compare.run import Run

STATE = "trainer_state.json"
#: A printed loss and that of the file are the same one if they differ by less: four digits.
PRINTED_TOLERANCE = 1e-3
_OPTION = re.compile(r"--output([-_]dir)?")
_KEY = re.compile(r"^output_dir:[ \t]*['\"]?([^\s'\"#]+)", re.MULTILINE)


def output_folders(words: Sequence[str]) -> tuple[Path, ...]:
    """Return the folders that a command's words, or the YAML files among them, name for output."""
    found = []
    for option, word in pairwise(["", *words]):
        if _OPTION.fullmatch(option):
            found.append(Path(word))
        elif word.endswith((".yaml", ".yml")):
            with suppress(OSError, ValueError):
                found += [Path(name) for name in _KEY.findall(Path(word).read_text("utf-8"))]
    return tuple(dict.fromkeys(found))


def read_all_digits(run: Run, folders: Sequence[Path]) -> None:
    """Set a run's `exact_losses` from the newest state that it wrote, if it has the printed ones.

    A file that is older than the run, or that has other losses, is passed over.
    """
    if not run.losses:
        return
    began_at = time.time() - (time.monotonic() - run.started_s)
    for path in _written_since(folders, began_at):
        losses = _losses_of(path)[-len(run.losses) :]
        if len(losses) == len(run.losses) and all(map(_is_same, run.losses, losses)):
            run.exact_losses = [repr(loss) for loss in losses]
            return


def use_all_digits(runs: Sequence[Run]) -> None:
    """Replace the printed losses if those of every run that counts are known with all digits."""
    complete = [run for run in runs if not run.problem]
    if all(run.exact_losses for run in complete):
        for run in complete:
            run.losses = run.exact_losses


def _written_since(folders: Sequence[Path], began_at: float) -> list[Path]:
    """Return the states that are newer than a time, the newest first."""
    found = {path for folder in folders for path in folder.rglob(STATE)}
    written = []
    for path in found:
        with suppress(OSError):  # removed meanwhile
            if path.stat().st_mtime >= began_at:
                written.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(written, reverse=True)]


def _losses_of(path: Path) -> list[float]:
    """Return the training losses in a state; none if it is not one."""
    with suppress(OSError, ValueError):
        state = parse_json(path.read_bytes())
        history = state.get("log_history") if isinstance(state, dict) else None
        rows = history if isinstance(history, list) else []
        losses = [row["loss"] for row in rows if isinstance(row, dict) and "loss" in row]
        if all(type(loss) in (int, float) for loss in losses):
            return [float(loss) for loss in losses]
    return []


def _is_same(printed: str, loss: float) -> bool:
    both_nan = math.isnan(float(printed)) and math.isnan(loss)
    return both_nan or math.isclose(float(printed), loss, rel_tol=PRINTED_TOLERANCE)
