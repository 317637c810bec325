"""Transfers: their stages, their order, and what becomes of one that fails or is abandoned."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from memascend.base.interfaces import Ticket
from memascend.base.waiting import CopyTicket, Ended
from memascend.errors import StoreError
from memascend.transfer.transfer import Transfer, Transfers
from tests.support.streaming_fakes import FakeEvent

NBYTES = 16


class Drive:
    """Tickets whose ends a test chooses, and the keys in the order in which they were written."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.ends: dict[str, FakeEvent] = {}

    def write(self, key: str) -> Callable[[], Ticket]:
        def start() -> Ticket:
            self.written.append(key)
            self.ends[key] = FakeEvent()
            return CopyTicket(self.ends[key])

        return start


@pytest.fixture
def drive() -> Drive:
    return Drive()


def transfer(
    key: str, ticket: Ticket, then: Callable[[], Ticket] | None = None, offset_bytes: int = 0
) -> Transfer:
    staged = torch.zeros(NBYTES, dtype=torch.uint8)
    return Transfer(key=key, staged=staged, offset_bytes=offset_bytes, ticket=ticket, then=then)


def refused() -> Ticket:
    raise StoreError(5, "no write")


# -- one -------------------------------------------------------------------------------------------


def test_the_drive_gets_it_once_the_copy_into_it_is_over(drive: Drive) -> None:
    copy = FakeEvent()
    one = transfer("a", CopyTicket(copy), drive.write("a"))
    assert not one.advance()
    assert (one.is_submitted, one.done(), drive.written) == (False, False, [])
    copy.passed = True
    assert one.advance()
    assert one.advance()
    assert (one.is_submitted, one.done(), drive.written) == (True, False, ["a"])
    drive.ends["a"].passed = True
    assert one.done()
    assert copy.wait_count == 0


def test_waiting_for_it_waits_for_both_stages(drive: Drive) -> None:
    copy = FakeEvent()
    one = transfer("a", CopyTicket(copy), drive.write("a"))
    one.wait()
    assert (copy.wait_count, drive.ends["a"].wait_count) == (1, 1)
    assert one.done()


def test_it_overlaps_the_bytes_that_it_has() -> None:
    one = transfer("a", Ended(), offset_bytes=32)
    ranges = [(0, 32), (0, 33), (47, 48), (48, 99)]
    assert [one.overlaps(*part) for part in ranges] == [False, True, True, False]


def test_one_that_cannot_start_fails_when_it_is_waited_for() -> None:
    one = transfer("a", Ended(), refused)
    assert one.advance()
    for _ in range(2):
        with pytest.raises(StoreError, match="no write"):
            one.wait()
    assert one.done()


def test_ctrl_c_behind_the_start_of_a_stage_leaves_it_to_be_started_again(drive: Drive) -> None:
    def start_and_interrupt() -> Ticket:
        drive.write("a")()
        if len(drive.written) == 1:
            raise KeyboardInterrupt
        return Ended()

    one = transfer("a", Ended(), start_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        one.submit()
    assert not one.is_submitted
    one.wait()
    assert drive.written == ["a", "a"]


@pytest.mark.parametrize("error", [None, StoreError(5, "no")], ids=["well", "failed"])
def test_one_that_is_abandoned_is_waited_for_whatever_comes_of_it(error: StoreError | None) -> None:
    assert transfer("a", Ended(error)).abandon()


def test_of_a_silent_drive_an_abandoned_one_keeps_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    event = FakeEvent()

    def give_up() -> None:
        raise StoreError(5, "silent, and the program ends")

    monkeypatch.setattr(event, "synchronize", give_up)
    assert not transfer("a", CopyTicket(event)).abandon()


# -- several ---------------------------------------------------------------------------------------


def several(drive: Drive, keys: str) -> tuple[Transfers, list[str], list[FakeEvent]]:
    """Transfers of which only the copies may be under way."""
    ended: list[str] = []
    transfers = Transfers(lambda one: ended.append(one.key))
    copies = [FakeEvent() for _ in keys]
    for number, (key, copy) in enumerate(zip(keys, copies, strict=True)):
        transfers.add(transfer(key, CopyTicket(copy), drive.write(key), NBYTES * number))
    return transfers, ended, copies


def test_they_go_to_the_drive_in_order_and_end_in_order(drive: Drive) -> None:
    transfers, ended, copies = several(drive, "abc")
    copies[1].passed = True
    transfers.end_done()
    assert drive.written == []  # the first is not over
    copies[0].passed = True
    transfers.end_done()
    assert drive.written == ["a", "b"]
    drive.ends["b"].passed = True
    transfers.end_done()
    assert (ended, len(transfers)) == ([], 3)
    drive.ends["a"].passed = True
    transfers.end_done()
    assert (ended, [one.key for one in transfers]) == (["a", "b"], ["c"])
    transfers.wait_oldest()
    assert (ended, len(transfers)) == (["a", "b", "c"], 0)


def test_all_up_to_a_key_are_submitted_or_just_all(drive: Drive) -> None:
    transfers, _, copies = several(drive, "abcb")
    transfers.submit("none")
    assert drive.written == []
    transfers.submit("b")
    assert drive.written == ["a", "b", "c", "b"]
    transfers, _, copies = several(drive, "de")
    transfers.submit()
    assert drive.written[4:] == ["d", "e"]
    assert [copy.wait_count for copy in copies] == [1, 1]


def test_those_before_an_overlapping_one_of_the_key_are_submitted_and_no_others(
    drive: Drive,
) -> None:
    transfers, _, copies = several(drive, "abaa")
    transfers.submit_overlapping("a", 2 * NBYTES, 2 * NBYTES + 1)
    assert drive.written == ["a", "a"]
    assert [copy.wait_count for copy in copies] == [1, 0, 1, 0]
    transfers.submit_overlapping("b", 0, NBYTES)
    assert drive.written == ["a", "a"]


def test_the_first_error_is_raised_once_and_each_failed_key_is_known(drive: Drive) -> None:
    ended: list[str] = []
    transfers = Transfers(lambda one: ended.append(one.key))
    for key, error in (("a", None), ("b", StoreError(5, "of b")), ("c", StoreError(5, "of c"))):
        transfers.add(transfer(key, Ended(error)))
    with pytest.raises(StoreError, match="of b"):
        transfers.wait_all()
    transfers.wait_all()
    assert ended == ["a", "b", "c"]
    assert [transfers.take_failure(key) for key in "abcb"] == [False, True, True, False]
