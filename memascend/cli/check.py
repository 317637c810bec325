"""A finding of `memascend doctor`, and how findings are printed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

_STYLES = {"ok": "green", "note": "yellow", "problem": "red"}


@dataclass(frozen=True, slots=True)
class Check:
    """One finding."""

    name: str
    state: str  # "ok"; "note": works, but could be better; "problem": prevents training
    found: str
    fix: str = ""  # the remedy; empty if none is needed


def print_findings(checks: list[Check]) -> None:
    """Print a line for each finding, remedies below them, and the verdict."""
    console = Console()
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(overflow="fold")
    for check in checks:
        table.add_row(Text(check.state, style=_STYLES[check.state]), check.name, Text(check.found))
        if check.fix:
            table.add_row("", "", Text(f"-> {check.fix}", style="bold"))
    console.print(table)
    counts = Counter(check.state for check in checks)
    verdict = f"{counts['problem']} problem(s) in the way" if counts["problem"] else "ready"
    console.print(f"{verdict}; {counts['note']} note(s) on what could be better")
