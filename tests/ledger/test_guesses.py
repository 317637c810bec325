"""The line of the ledger on steps that were begun as a guess."""

from __future__ import annotations

from memascend.ledger.guesses import Guesses


def test_both_counts_are_told() -> None:
    found = Guesses(right=12, wrong=3).describe()
    assert found == "begun during backward: 12 steps, and 3 that were made again"
