"""A walk that begins late does so when it is waited for, and both are counted."""

from __future__ import annotations

import pytest

from memascend.streaming.background import BackgroundStep

from .walks import watched


@pytest.mark.parametrize("late", [False, True])
def test_walks_are_counted_and_those_that_were_met(late: bool) -> None:
    stepped: list[str] = []

    def begin(walk: BackgroundStep, name: str) -> None:
        walk.start([lambda reach: stepped.append(name)], {"value": (0, 1)}, lambda: None)

    walk = BackgroundStep()
    with watched(late=late) as walks:
        begin(walk, "first")
        walk.wait_for(["other"])  # none of the walk's
        assert walks.met == 0
        if late:
            assert stepped == []
            walk.wait_for(["other", "value"])
            walk.wait_for(["value"])
            assert walks.met == 1
        walk.finish()
        begin(walk, "second")
        walk.finish()
    assert stepped == ["first", "second"]
    assert (walks.begun, walks.met) == (2, int(late))
    walk.finish()
    begin(walk, "third")  # as ever
    walk.finish()
    walk.close()
    assert (stepped[-1], walks.begun) == ("third", 2)
