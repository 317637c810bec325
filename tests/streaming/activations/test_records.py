"""A record's errors, and what is left of a storage that nobody has any more."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from memascend.streaming.activations.records import (
    DEVICE_ONLY,
    OFF_DEVICE,
    TRANSITIONS,
    Act,
    Activation,
    Record,
    State,
    state_after,
)


def record(state: State = State.NEW) -> Record:
    made = Record(7, torch.zeros(4))
    made.state = state
    return made


def test_what_was_modified_in_place_is_refused_as_autograd_does() -> None:
    found = record()
    found.check_version()
    assert found.saved is not None
    found.saved.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*\[4\].*version 1"):
        found.check_version()
    found.drop_data()
    found.check_version()  # nobody can modify it any more


@pytest.mark.parametrize("state", list(State))
def test_nobody_frees_what_the_thread_may_be_using(state: State) -> None:
    dropped: deque[Record] = deque()
    found = record(state)
    activation = Activation(found, dropped)
    assert not dropped
    del activation
    assert list(dropped) == [found]
    assert (found.data is None) == (state in DEVICE_ONLY)


def test_every_state_is_reached_and_left_and_other_acts_are_refused() -> None:
    reached = {State.NEW}
    while (
        more := {
            after[state] for after in TRANSITIONS.values() for state in reached if state in after
        }
        - reached
    ):
        reached |= more
    assert reached == set(State)
    with pytest.raises(AssertionError, match=r"END_READ of a saved activation.*WAITING"):
        state_after(State.WAITING, Act.END_READ)


def test_bytes_leave_the_device_only_once_the_drive_has_them_or_with_the_storage() -> None:
    for act, after in TRANSITIONS.items():
        for old, new in after.items():
            if new in OFF_DEVICE and old not in OFF_DEVICE:
                assert act in (Act.DROP, Act.FAIL_READ) or old not in DEVICE_ONLY, (act, old)
