"""What can only be seen on a CUDA device: checks, each with a control that must fail.

A check measures, and a verdict is given on the figures alone. Its control is the same measurement
of something deliberately broken: if the verdict on that is not "fail", the check cannot fail, and
has not passed either. Nothing here uses CUDA while it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Figures = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing to see.

    Attributes:
        name: On the command line and in the report.
        promise: What holds if it passes.
        measure: Gives figures that fit JSON, of the thing itself or of the broken one. It gets a
            folder on the drive and whether to break it, and runs in a fresh process.
        verdict: What is wrong with figures; nothing if all is well.
        control: What is broken in the control.
        noticed_min: How many things are wrong in the control: each has to be noticed.
        gpus: How many devices it needs.
        needs: Returns the reason why the machine cannot run it, "" if it can. `measure` may find
            more: it raises `cases.Lack` then.
        seconds: Estimated duration with its control.
    """

    name: str
    promise: str
    measure: Callable[[Path, bool], dict[str, Any]]
    verdict: Callable[[Figures], list[str]]
    control: str
    noticed_min: int = 1
    gpus: int = 1
    needs: Callable[[], str] = lambda: ""
    seconds: float = 20.0

    def problems(self, whole: Figures, broken: Figures) -> list[str]:
        """Why it has not passed: what is wrong, or that the control was not noticed."""
        found = self.verdict(whole)
        noticed = self.verdict(broken)
        if len(noticed) < self.noticed_min:
            found.append(f"the control was not noticed: {self.control}: only {noticed}")
        return found
