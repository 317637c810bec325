"""Checkpoints that runs of parity save, load in another way, and compare value by value."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from .cases import Backend, Case
from .workers import Bench


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint in `folder`, and digests of the values that the run had at its end."""

    case: Case
    folder: Path
    states: dict[str, str]

    def later(self, **changes: Any) -> Case:
        """The run that loads it, and goes on for two steps unless told otherwise."""
        first = self.case.steps
        values = {"load_from": str(self.folder), "save_to": ""}
        values |= {"first_step": first, "steps": first + 2}
        return dataclasses.replace(self.case, **(values | changes))

    @property
    def tag(self) -> Path:
        return self.folder / (self.folder / "latest").read_text()

    def to_universal(self) -> Path:
        """The checkpoint as a universal one, beside it; `later` may load it from then on."""
        output = self.folder / "universal"
        python(
            "-m", "memascend.cli.main", "checkpoint", "to-universal", self.tag, "--output", output
        )
        return output

    def values(self) -> dict[str, torch.Tensor]:
        """The master weights and states of whole tensors, by parameter and state."""
        return {
            f"{path.parent.name} {path.stem}": torch.load(path)
            for path in (self.to_universal() / "zero").glob("*/*.pt")
            if path.stem != "step"
        }


def python(*arguments: object) -> None:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def save(bench: Bench, folder: Path, case: Case, backend: Backend) -> Saved:
    """Train a case, and save it at its end."""
    case = dataclasses.replace(case, save_to=str(folder))
    return Saved(case, folder, bench.run(case, backend)[0]["states"])
