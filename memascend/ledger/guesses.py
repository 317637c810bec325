"""Counts of steps that were begun during backward as a guess."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Guesses:
    """Guesses that nothing will change the step that was begun."""

    right: int = 0  # steps whose early tiles were used
    wrong: int = 0  # steps that were made again

    def describe(self) -> str:
        """Return a line of the ledger."""
        return f"begun during backward: {self.right} steps, and {self.wrong} that were made again"
