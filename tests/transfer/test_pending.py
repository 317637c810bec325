"""What is kept until a transfer is over: in order, and through errors and Ctrl-C."""

from __future__ import annotations

import pytest

from memascend.base.waiting import CopyTicket, Ended
from memascend.errors import StoreError
from memascend.transfer.pending import Pending
from tests.support.streaming_fakes import FakeEvent


def filled(*events: FakeEvent) -> tuple[Pending[int], list[int]]:
    released: list[int] = []
    pending: Pending[int] = Pending(released.append)
    for number, event in enumerate(events):
        pending.add(CopyTicket(event), number)
    return pending, released


def test_what_is_over_is_released_in_order_without_a_wait() -> None:
    events = [FakeEvent() for _ in range(3)]
    pending, released = filled(*events)
    events[1].passed = True
    pending.release_done()
    assert released == []  # the oldest is not over
    events[0].passed = True
    pending.release_done()
    assert (released, list(pending), len(pending)) == ([0, 1], [2], 1)
    assert [event.wait_count for event in events] == [0] * 3


def test_the_oldest_is_waited_for_and_then_all() -> None:
    events = [FakeEvent() for _ in range(3)]
    pending, released = filled(*events)
    pending.wait_oldest()
    assert (released, events[1].passed) == ([0], False)
    assert not pending.done()
    events[1].passed = events[2].passed = True
    assert (pending.done(), released) == (True, [0])  # looking releases nothing
    pending.wait()
    assert (released, len(pending), pending.done()) == ([0, 1, 2], 0, True)


def test_an_error_is_raised_after_all_are_over_and_released() -> None:
    released: list[str] = []
    pending: Pending[str] = Pending(released.append)
    pending.add(Ended(StoreError(5, "the first")), "first")
    pending.add(Ended(StoreError(5, "the second")), "second")
    with pytest.raises(StoreError, match="the first"):
        pending.wait()
    assert released == ["first", "second"]
    pending.wait()


def test_one_whose_wait_ctrl_c_ended_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    event = FakeEvent()
    pending, released = filled(event)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(event, "synchronize", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pending.wait_oldest()
    assert (released, len(pending)) == ([], 1)
    pending.wait_oldest()
    assert released == [0]
