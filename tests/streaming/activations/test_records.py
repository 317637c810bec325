"""A record's errors, and what is left of a storage that nobody has any more."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch

from memascend.streaming.activations.records import Activation, Record, State


def record(**changes: Any) -> Record:
    saved = torch.zeros(4)
    fields = {
        "number": 7,
        "nbytes": saved.nbytes,
        "saved": saved,
        "data": saved.view(torch.uint8),
        "filled": None,
        "device": saved.device,
        "version": saved._version,
    }
    return Record(**(fields | changes))


def test_what_was_modified_in_place_is_refused_as_autograd_does() -> None:
    found = record()
    found.check_version()
    assert found.saved is not None
    found.saved.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*\[4\].*version 1"):
        found.check_version()
    found.let_go()
    found.check_version()  # nobody can modify it any more


@pytest.mark.parametrize("state", list(State))
def test_nobody_frees_what_the_thread_may_be_using(state: State) -> None:
    dropped: deque[Record] = deque()
    found = record(state=state)
    activation = Activation(found, dropped)
    assert not dropped
    del activation
    assert list(dropped) == [found]
    assert (found.data is None) == (state is State.WAITING)
