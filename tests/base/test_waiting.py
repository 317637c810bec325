"""Waiting for several: all are over before the first error is raised. Events that block."""

from __future__ import annotations

import pytest

from memascend.base.waiting import CopyTicket, CountedEvents, Ended, event_here, new_event, wait_all
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


def test_waits_for_a_device_are_counted_and_events_stay_what_they_are() -> None:
    made: list[ChoosyEvent] = []

    class Slow(ChoosyEvent):
        def __init__(self, **settings: bool) -> None:
            super().__init__(**settings)
            self.is_waited_for = False
            made.append(self)

        def synchronize(self) -> None:
            self.is_waited_for = True
            raise RuntimeError("the device is gone")

    events = CountedEvents(Slow)
    event = new_event(events)
    assert made[0].blocking
    event.record()
    assert event.query()
    assert events.waited_s == 0.0
    with pytest.raises(RuntimeError):
        event.synchronize()
    assert events.waited_s > 0.0


def test_an_accelerator_without_blocking_events_is_known_as_such_when_counted() -> None:
    assert new_event(CountedEvents(SpinningEvent)).query()
