"""A rank that runs out of memory alone ends all ranks with an error; ranks that all do go on."""

from __future__ import annotations

import gc
import itertools
import json
import threading
import weakref
from typing import Any

import pytest

pytest.importorskip("deepspeed")
import torch

from memascend.deepspeed.attach import lone_failure as module
from memascend.errors import LoneRankError

pytestmark = pytest.mark.deepspeed

SOON_S = 20.0


class DeviceEvent:
    """A mark of a device that has come behind it, or waits for another rank before it."""

    has_passed = False

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.has_passed


class Rank(module.LoneFailures):
    """A rank that ends by setting an event."""

    def __init__(self, store: Any, rank: int) -> None:
        self.ended = threading.Event()
        self.message = ""
        super().__init__(store, rank, 2, self._note_end)

    def _note_end(self, message: str) -> None:
        self.message = message
        self.ended.set()

    def begin(self, *, was_left: bool = False) -> None:
        self.begin_pass(trains=True, was_left=was_left)

    def fail(self, *, trains: bool = True) -> torch.OutOfMemoryError:
        error = torch.OutOfMemoryError("no room for 2 GiB")
        with (
            pytest.raises(torch.OutOfMemoryError),
            module.noting_forward(self, trains=trains, was_left=False),
        ):
            raise error
        return error

    def evaluate(self) -> None:
        with module.noting_forward(self, trains=False, was_left=False):
            pass


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


def assert_none_ends(ranks: Any) -> None:
    assert not ranks[0].ended.wait(2 * module.PATIENCE_S)
    assert not ranks[1].ended.is_set()


def test_the_others_end_with_an_error_that_names_the_rank_and_the_remedy(ranks: Any) -> None:
    ranks[0].begin()
    error = str(ranks[1].fail())
    assert error.startswith("no room for 2 GiB\nmemascend: this is rank 1 of 2")
    assert "micro_batches.sequences" in error
    assert ranks[0].ended.wait(SOON_S)
    assert "rank 1 of 2 failed alone" in ranks[0].message
    for words in ("no room for 2 GiB", "micro_batches.sequences", "rank 0 waits"):
        assert words in ranks[0].message
    with pytest.raises(LoneRankError, match=r"rank 1 failed .* rank\(s\) 0 did not") as found:
        ranks[1].begin()
    assert (found.value.rank, found.value.others) == (1, [0])
    assert not ranks[1].ended.is_set()


@pytest.mark.parametrize("trains", [True, False])
def test_a_pass_in_which_all_ranks_failed_begins_again(ranks: Any, trains: bool) -> None:
    for one in ranks:
        one.fail(trains=trains)
    for _ in range(2):
        for one in ranks:
            one.begin()
    assert_none_ends(ranks)


def test_a_step_that_fails_alone_behind_a_failed_evaluation_is_noted(ranks: Any) -> None:
    for one in ranks:
        one.fail(trains=False)
    with pytest.raises(torch.OutOfMemoryError), module.noting(ranks[1]):
        raise torch.OutOfMemoryError("no room in a step")
    assert ranks[0].ended.wait(SOON_S)
    assert "no room in a step" in ranks[0].message


def test_a_failure_before_the_first_pass_that_trains_is_noted(ranks: Any) -> None:
    ranks[0].begin_pass(trains=False, was_left=False)
    ranks[1].fail(trains=False)
    assert ranks[0].ended.wait(SOON_S)


def test_an_evaluation_that_the_others_end_goes_on_without_the_rank_that_failed(
    ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had joined all collectives, and they may do anything before their next pass."""
    for one in ranks:
        one.begin()
    ranks[0].evaluate()
    ranks[1].fail(trains=False)
    assert_none_ends(ranks)
    monkeypatch.setattr(module, "PATIENCE_S", SOON_S)
    ranks[1].evaluate()


def test_an_evaluation_that_a_device_has_not_ended_lets_no_rank_go_on(ranks: Any) -> None:
    """Its host runs ahead of a collective that the failed rank never joined."""
    event = DeviceEvent()
    ranks[0]._new_event = lambda: event
    ranks[0].evaluate()
    ranks[1].fail(trains=False)
    assert ranks[0].look()
    assert ranks[1]._may_wait(0)
    event.has_passed = True
    assert ranks[0].look()
    assert not ranks[1]._may_wait(0)


def test_an_evaluation_that_an_error_of_a_script_ended_lets_no_rank_go_on(ranks: Any) -> None:
    with (
        pytest.raises(ValueError, match="own"),
        module.noting_forward(ranks[0], trains=False, was_left=False),
    ):
        raise ValueError("own")
    ranks[1].fail(trains=False)
    with pytest.raises(LoneRankError):
        ranks[1].begin()


def test_a_backward_pass_that_was_left_is_noted_by_the_next_forward_pass(ranks: Any) -> None:
    for one in ranks:
        one.begin()
    with pytest.raises(LoneRankError):
        ranks[1].begin(was_left=True)
    assert ranks[0].ended.wait(SOON_S)
    assert "backward pass" in ranks[0].message


def test_all_ranks_may_leave_a_backward_pass(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", SOON_S)
    for one in ranks:
        one.begin()
    second = threading.Thread(target=ranks[1].begin, kwargs={"was_left": True})
    second.start()
    ranks[0].begin(was_left=True)
    second.join(SOON_S)
    assert [one._position for one in ranks] == [(2, 0)] * 2


def test_an_error_that_passes_several_calls_is_noted_once(ranks: Any) -> None:
    error = torch.OutOfMemoryError("no room")
    ranks[0].begin()
    with (
        pytest.raises(torch.OutOfMemoryError),
        module.noting(ranks[0]),
        module.noting_forward(ranks[0], trains=False, was_left=False),
    ):
        raise error
    assert str(error).count("memascend:") == 1
    assert json.loads(ranks[0]._store.get("memascend/7/last"))["position"] == [1, 1]


def test_other_errors_are_not_noted(ranks: Any) -> None:
    with pytest.raises(ValueError, match="own"), module.noting(ranks[0]):
        raise ValueError("own")
    assert not ranks[0]._store.check(["memascend/7/last"])


def test_one_rank_has_none() -> None:
    assert module.lone_failures(None) is None
    with pytest.raises(torch.OutOfMemoryError, match=r"^no room$"), module.noting(None):
        raise torch.OutOfMemoryError("no room")


def test_a_thread_ends_with_the_store(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(ranks[0], "_store", type("Gone", (), {"add": fail})())
    ranks[0].begin()
    ranks[0]._thread.join(SOON_S)
    assert not ranks[0]._thread.is_alive()


def test_a_thread_that_outlives_its_end_ends_later(ranks: Any) -> None:
    """Its store answers late, and meanwhile another pass began."""
    has_asked, may_answer = threading.Event(), threading.Event()
    store = ranks[0]._store

    class Slow:
        def add(self, *arguments: Any) -> int:
            has_asked.set()
            assert may_answer.wait(SOON_S)
            return int(store.add(*arguments))

    ranks[0]._store = Slow()
    ranks[0].begin()
    first = ranks[0]._thread
    assert has_asked.wait(SOON_S)
    ranks[0].close()
    ranks[0].begin()
    assert ranks[0]._thread is not first
    may_answer.set()
    first.join(SOON_S)
    assert not first.is_alive()
    assert ranks[0]._thread.is_alive()


def test_a_thread_ends_with_its_model(ranks: Any) -> None:
    ranks[0].begin()
    thread, gone = ranks[0]._thread, weakref.ref(ranks[0])
    del ranks[0]
    gc.collect()
    thread.join(SOON_S)
    assert not thread.is_alive()
    assert gone() is None
