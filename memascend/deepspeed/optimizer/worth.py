"""Whether steps during backward pay, from the times of a run's own steps.

A step is measured from the decision before to its own, so the time has the walk of the step before
and this step's backward pass. If the step before was not taken from early tiles and this one has
early tiles, that is the time of a wrong guess: no wrong guess has to happen to know it.

Pure arithmetic. Every rank decides by itself: bits do not depend on it, nor does any collective.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from statistics import median_low

#: First steps that are not measured: states are created, code is compiled.
WARM_COUNT = 2
#: Steps of one kind in a row while they are measured; the first of them is of another kind.
ROW_COUNT = 5
#: Times of steps that are compared, of each kind; their lower medians count, which a few slow steps
#: do not move.
SAMPLE_COUNT = 8
#: Part of a step that must be saved: less may be chance.
SAVED_PART_MIN = 0.02


class _Kind(Enum):
    AFTER = "after"  #: all tiles of the walk and none in backward
    RIGHT = "right"  #: the rest of the tiles in the walk, the others in backward
    WRONG = "wrong"  #: all tiles in the walk, and in backward


#: By whether early tiles were used in the step before, and whether this one has some. A time with
#: the former alone is of no kind.
_KINDS = {(False, False): _Kind.AFTER, (True, True): _Kind.RIGHT, (False, True): _Kind.WRONG}


class Worth:
    """Measures steps of both kinds in turns, and decides once."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        """Start with steps after backward.

        Args:
            now_s: Returns a time in seconds.
        """
        self._now_s = now_s
        self._count = 0
        self._last_s = 0.0
        self._were_used = False
        self._times_s = {kind: deque[float](maxlen=SAMPLE_COUNT) for kind in _Kind}
        #: Greatest share of wrong guesses with which steps during backward pay; 0: they do not;
        #: None: not known yet.
        self.wrong_share_max: float | None = None

    def wants(self) -> bool:
        """Return whether the coming step shall begin during backward."""
        if self.wrong_share_max is not None:
            return self.wrong_share_max > 0
        return self._count >= WARM_COUNT and (self._count - WARM_COUNT) // ROW_COUNT % 2 == 1

    def note(self, *, was_begun: bool, was_right: bool) -> str:
        """Note a step when it is decided.

        Args:
            was_begun: Whether tiles were stepped during backward.
            was_right: Whether their results are used.

        Returns:
            The decision in words, when this step brings it; else an empty text.
        """
        now_s, kind = self._now_s(), _KINDS.get((self._were_used, was_begun))
        if self._count >= WARM_COUNT and kind is not None:
            self._times_s[kind].append(now_s - self._last_s)
        self._count += 1
        self._last_s, self._were_used = now_s, was_right
        is_known = all(len(self._times_s[kind]) == SAMPLE_COUNT for kind in list(_Kind)[:2])
        return self._decide() if is_known and self.wrong_share_max is None else ""

    def _decide(self) -> str:
        after_s, right_s, wrong_s = (median_low(self._times_s[kind]) for kind in _Kind)
        saved_s, lost_s = after_s - right_s, max(0.0, wrong_s - after_s)
        pays = saved_s > SAVED_PART_MIN * after_s
        self.wrong_share_max = saved_s / (saved_s + lost_s) if pays else 0.0
        return (
            f"steps {'begin during' if pays else 'stay after'} backward from now on: a step takes "
            f"{right_s:.2f} s so, {after_s:.2f} s after backward, and {wrong_s:.2f} s if it has to "
            "be made again"
        )
