"""Waiting for several: all are over before the first error is raised. Events that block."""

from __future__ import annotations

import pytest

from memascend.base.waiting import CopyTicket, Ended, EventPool, event_here, new_event, wait_all
from tests.support.streaming_fakes import FakeEvent


class Transfer:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.is_over = False

    def wait(self) -> None:
        self.is_over = True
        if self.error is not None:
            raise self.error


def test_all_are_over_when_the_first_error_is_raised() -> None:
    first, second = OSError("first"), OSError("second")
    transfers = [Transfer(), Transfer(first), Transfer(second), Transfer()]
    with pytest.raises(OSError, match="first") as caught:
        wait_all(transfer.wait for transfer in transfers)
    assert caught.value is first
    assert all(transfer.is_over for transfer in transfers)


def test_nothing_is_raised_when_nothing_failed() -> None:
    transfers = [Transfer(), Transfer()]
    wait_all(transfer.wait for transfer in transfers)
    wait_all([])
    assert all(transfer.is_over for transfer in transfers)


def test_what_has_ended_is_done_and_raises_what_kept_it_from_beginning() -> None:
    Ended().wait()
    assert Ended().done()
    error = OSError("the drive is full")
    assert Ended(error).done()
    with pytest.raises(OSError, match="full") as caught:
        Ended(error).wait()
    assert caught.value is error


class SpinningEvent:
    """As of an accelerator whose events cannot be asked for anything."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class ChoosyEvent(SpinningEvent):
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.blocking = blocking


def test_an_event_blocks_instead_of_spinning_where_the_accelerator_has_such() -> None:
    event = new_event(ChoosyEvent)
    assert isinstance(event, ChoosyEvent)
    assert event.blocking
    assert type(new_event(SpinningEvent)) is SpinningEvent


def test_an_event_is_recorded_where_it_is_made_and_the_cpu_needs_none() -> None:
    event = event_here(FakeEvent)
    assert isinstance(event, FakeEvent)
    assert event.recorded
    assert event_here(None) is None


def test_the_ticket_of_a_copy_is_over_with_its_event() -> None:
    event = FakeEvent()
    ticket = CopyTicket(event)
    assert not ticket.done()
    ticket.wait()
    assert event.wait_count == 1
    assert ticket.done()


class Events:
    """A device's class of events, and all that were made."""

    def __init__(self) -> None:
        self.made: list[FakeEvent] = []

    def __call__(self) -> FakeEvent:
        self.made.append(FakeEvent())
        return self.made[-1]


def test_an_event_that_nobody_has_any_more_and_that_has_passed_is_used_again() -> None:
    events = Events()
    pool = EventPool(events)
    for how in ("query", "synchronize"):
        event = pool()
        event.record()
        events.made[0].passed = how == "query"
        getattr(event, how)()
        del event
    pool().record()
    assert len(events.made) == 1


def test_an_event_that_somebody_has_is_nobody_elses_though_it_has_passed() -> None:
    """Whoever asked it again would be told of another copy, and in silence."""
    events = Events()
    pool = EventPool(events)
    held = pool()
    tickets = [CopyTicket(held)]
    held.synchronize()
    del held
    other = pool()
    other.record()
    assert [event.recorded for event in events.made] == [False, True]
    del tickets
    third = pool()
    third.record()
    assert [event.recorded for event in events.made] == [True, True]


def test_an_event_that_was_not_seen_to_pass_is_not_used_again() -> None:
    events = Events()
    pool = EventPool(events)
    for passes in (False, True):
        event = pool()
        event.record()
        event.query()
        if passes:
            event.synchronize()
            event.record()  # anew: it has not passed
        del event
    assert pool() is not None
    assert len(events.made) == 3


def test_no_more_events_are_kept_than_the_limit() -> None:
    events = Events()
    pool = EventPool(events, free_count_max=3)
    for _ in range(4):
        held = [pool() for _ in range(5)]
        for event in held:
            event.synchronize()
        held.clear()
        del event
    assert len(events.made) == 5 + 3 * (5 - 3)


def test_waits_for_a_device_are_counted_and_an_error_is_the_devices() -> None:
    class Lost(ChoosyEvent):
        def synchronize(self) -> None:
            raise RuntimeError("the device is gone")

    pool = EventPool(Lost)
    event = pool()
    assert event.query()
    assert pool.waited_s == 0.0
    with pytest.raises(RuntimeError):
        event.synchronize()
    assert pool.waited_s > 0.0


def test_streams_wait_for_an_event_of_the_pool_and_threads_sleep_meanwhile() -> None:
    waits: list[ChoosyEvent] = []

    class Waited(ChoosyEvent):
        def wait(self) -> None:
            waits.append(self)

    EventPool(Waited)().wait()
    assert [event.blocking for event in waits] == [True]
