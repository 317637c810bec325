"""Waiting for several: all are over before the first error is raised."""

from __future__ import annotations

import pytest

from memascend.base.waiting import Ended, wait_all


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
