"""A rank that runs out of memory alone ends all ranks with an error; ranks that all do go on."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest

pytest.importorskip("deepspeed")
import torch

from memascend.deepspeed.attach import lone_failure as module
from memascend.errors import LoneRankError

pytestmark = pytest.mark.deepspeed

SOON_S = 20.0


class Rank(module.LoneFailures):
    """A rank that ends by setting an event."""

    def __init__(self, store: Any, rank: int) -> None:
        self.ended = threading.Event()
        self.message = ""
        super().__init__(store, rank, 2, self._note_end)

    def _note_end(self, message: str) -> None:
        self.message = message
        self.ended.set()

    def fail(self) -> torch.OutOfMemoryError:
        error = torch.OutOfMemoryError("no room for 2 GiB")
        with pytest.raises(torch.OutOfMemoryError), module.noting(self, begins=True):
            raise error
        return error


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "_numbers", itertools.repeat(7))
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    monkeypatch.setattr(module, "POLL_S", 0.02)
    store = torch.distributed.HashStore()
    both = [Rank(store, rank) for rank in range(2)]
    yield both
    for one in both:
        one.close()


def test_the_others_end_with_an_error_that_names_the_rank_and_the_remedy(ranks: Any) -> None:
    with module.noting(ranks[0], begins=True):
        pass
    error = str(ranks[1].fail())
    assert error.startswith("no room for 2 GiB\nmemascend: this is rank 1 of 2")
    assert "micro_batches.sequences" in error
    assert ranks[0].ended.wait(SOON_S)
    assert "rank 1 of 2 ran out of device memory alone" in ranks[0].message
    for words in ("no room for 2 GiB", "micro_batches.sequences", "rank 0 waits"):
        assert words in ranks[0].message
    with pytest.raises(LoneRankError, match=r"rank 1 ran out .* rank\(s\) 0 did not") as found:
        ranks[1].begin_pass()
    assert (found.value.rank, found.value.others) == (1, [0])
    assert not ranks[1].ended.is_set()


def test_a_pass_in_which_all_ranks_failed_begins_again(ranks: Any) -> None:
    for one in ranks:
        one.fail()
    for _ in range(2):
        for one in ranks:
            one.begin_pass()
    assert not ranks[0].ended.wait(3 * module.PATIENCE_S + 3 * module.POLL_S)
    assert not ranks[1].ended.is_set()


def test_an_error_that_passes_several_calls_is_noted_once(ranks: Any) -> None:
    error = torch.OutOfMemoryError("no room")
    ranks[0].begin_pass()
    with pytest.raises(torch.OutOfMemoryError), module.noting(ranks[0]), module.noting(ranks[0]):
        raise error
    assert str(error).count("memascend:") == 1


def test_other_errors_and_passes_without_a_gradient_are_no_passes(ranks: Any) -> None:
    with pytest.raises(ValueError, match="own"), module.noting(ranks[0], begins=True):
        raise ValueError("own")
    ranks[0].begin_pass()
    with torch.no_grad(), module.noting(ranks[0], begins=True):
        pass
    assert ranks[0]._pass_number == 2


def test_one_rank_has_none() -> None:
    assert module.lone_failures() is None
    with module.noting(None, begins=True):
        pass


def test_a_thread_ends_with_the_store(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(ranks[0], "_store", type("Gone", (), {"add": fail})())
    ranks[0].begin_pass()
    ranks[0]._thread.join(SOON_S)
    assert not ranks[0]._thread.is_alive()
