"""Guesses whether the norm of the coming step will be within `gradient_clipping`.

A guess decides only whether tiles are stepped during backward: a wrong one costs time, and writes
whose results are dropped. It is made from the norms of earlier steps alone, which all ranks know.
The rule was the best of five simple ones for log-normal norms with correlation.
"""

from __future__ import annotations

from collections import deque

from memascend.ledger.guesses import Guesses

#: A step is guessed to be within the limit if so many before it were.
WITHIN_COUNT = 4
#: No guess while so many of the last steps were guessed wrong. The share at which guesses stop
#: paying is above this where reads decide, and far below it where writes do (docs/benchmarks.md).
WRONG_COUNT_MAX, WATCHED_COUNT = 8, 64


class ClipGuess:
    """Guesses of one run, and their counts."""

    def __init__(self) -> None:
        """Start without a step: the first ones are not guessed."""
        self._within: deque[bool] = deque(maxlen=WITHIN_COUNT)
        self._wrong: deque[bool] = deque(maxlen=WATCHED_COUNT)
        self.counts = Guesses()

    def wants(self) -> bool:
        """Return whether the coming step is guessed to be within the limit."""
        is_within = len(self._within) == WITHIN_COUNT and all(self._within)
        return is_within and sum(self._wrong) < WRONG_COUNT_MAX

    def note(self, *, is_within: bool, was_guessed: bool, was_right: bool) -> None:
        """Note a step.

        Args:
            is_within: Whether its norm was within the limit.
            was_guessed: Whether tiles were stepped during backward.
            was_right: Whether their results were taken.
        """
        is_wrong = was_guessed and not was_right
        self._within.append(is_within)
        self._wrong.append(is_wrong)
        self.counts.right += was_guessed and was_right
        self.counts.wrong += is_wrong
