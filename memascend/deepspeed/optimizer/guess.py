"""Guesses whether the coming step may begin during backward.

A guess decides only whether tiles are stepped during backward: a wrong one costs time, and writes
whose results are dropped. It is right if the norm is within `gradient_clipping`, and the script
changes nothing between backward and step. The rule for norms was the best of five simple ones for
log-normal norms with correlation.
"""

from __future__ import annotations

import logging
from collections import deque

from deepspeed import comm as dist

from memascend.deepspeed.optimizer.worth import Worth
from memascend.ledger.guesses import Guesses

log = logging.getLogger(__name__)

#: A step is guessed to be within the limit if so many before it were.
WITHIN_COUNT = 4
#: No guess while more than this share of the guesses in the last steps were wrong, and one more.
#: The share at which guesses stop paying is above it where reads decide, and far below it where
#: writes do (docs/design/measurements.md); `Worth` measures it.
WRONG_SHARE_MAX, WATCHED_COUNT = 1 / 8, 64


class Guess:
    """Guesses of one run, and their counts."""

    def __init__(self, worth: Worth | None = None) -> None:
        """Start without a step: the first ones are not guessed.

        Args:
            worth: Finds out whether guesses pay; None: they shall be made.
        """
        self._worth = worth
        self._within: deque[bool] = deque(maxlen=WITHIN_COUNT)
        self._outcomes: deque[bool | None] = deque(maxlen=WATCHED_COUNT)  # right; None: no guess
        self.counts = Guesses()

    def wants(self) -> bool:
        """Return whether the coming step shall be begun during backward."""
        is_wanted = self._worth is None or self._worth.wants()
        is_within = len(self._within) == WITHIN_COUNT and all(self._within)
        return is_wanted and is_within and self._are_mostly_right()

    @property
    def is_over(self) -> bool:
        """Whether no step is guessed any more, because that does not pay."""
        return self._worth is not None and self._worth.wrong_share_max == 0

    def _are_mostly_right(self) -> bool:
        share = WRONG_SHARE_MAX
        if self._worth is not None and self._worth.wrong_share_max is not None:
            share = min(share, self._worth.wrong_share_max)
        made = len(self._outcomes) - self._outcomes.count(None)
        return self._outcomes.count(False) < 1 + share * made

    def note(self, *, is_within: bool, was_guessed: bool, was_right: bool) -> None:
        """Note a step.

        Args:
            is_within: Whether its norm was within the limit.
            was_guessed: Whether tiles were stepped during backward.
            was_right: Whether their results were taken.
        """
        is_right = was_guessed and was_right
        self._within.append(is_within)
        self._outcomes.append(is_right if was_guessed else None)
        self.counts.right += is_right
        self.counts.wrong += was_guessed and not was_right
        if self._worth is not None:
            decision = self._worth.note(was_begun=was_guessed, was_right=is_right)
            if decision and dist.get_rank() == 0:
                log.info("memascend: %s", decision)
