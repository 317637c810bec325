"""Steps behind their caller: how many there were, and how to have each come as late as can be.

How far a walk is when the next forward pass wants its values is chance, and with models as small as
these it is often over. A late one begins when it is first waited for: the forward pass then meets
nothing but old values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import pytest

from memascend.streaming.background import BackgroundStep, QueuedStep, WalkPoint

WAIT_S = 120.0


@dataclass
class Walks:
    """What a training did behind its steps.

    Attributes:
        begun: Walks.
        met: Of those the ones that a gather had to wait for.
    """

    begun: int = 0
    met: int = 0


@contextmanager
def watched(*, late: bool) -> Iterator[Walks]:
    """Count walks; with `late` none does anything before somebody waits for it."""
    found = Walks()
    asked: WeakKeyDictionary[BackgroundStep, threading.Event] = WeakKeyDictionary()
    met: set[threading.Event] = set()
    start, wait_for, finish = BackgroundStep.start, BackgroundStep.wait_for, BackgroundStep.finish

    def start_watched(
        self: BackgroundStep,
        steps: Sequence[QueuedStep],
        points: Mapping[str, WalkPoint],
        end: Callable[[], object],
    ) -> None:
        found.begun += 1
        may_go = asked[self] = threading.Event()
        start(self, [_behind(may_go, steps[0]), *steps[1:]] if late else steps, points, end)

    def wait_watched(self: BackgroundStep, names: Iterable[str]) -> None:
        wanted = list(names)
        if not all(map(self.has_passed, wanted)):
            found.met += asked[self] not in met
            met.add(asked[self])
            asked[self].set()
        wait_for(self, wanted)

    def finish_watched(self: BackgroundStep) -> None:
        if self in asked:
            asked[self].set()
        finish(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BackgroundStep, "start", start_watched)
        patch.setattr(BackgroundStep, "wait_for", wait_watched)
        patch.setattr(BackgroundStep, "finish", finish_watched)
        yield found


def _behind(may_go: threading.Event, step: QueuedStep) -> QueuedStep:
    def wait_and_step(reach: Callable[[int], None]) -> None:
        if not may_go.wait(WAIT_S):
            raise TimeoutError("nobody waited for the walk")
        step(reach)

    return wait_and_step
