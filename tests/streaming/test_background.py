"""A walk behind its caller: who waits for what, and where its errors come up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from memascend.errors import StoreError
from memascend.streaming.background import BackgroundStep
from tests.support.activation_streams import wait_until
from tests.support.ctrl_c import interruptions

#: Two steps; "a" is the first half of the first one.
PLACES = {"a": (0, 5), "b": (0, 10), "c": (1, 10)}


class Held:
    """Steps that go on when they are told how far."""

    def __init__(self) -> None:
        self.may_go = [threading.Event() for _ in range(4)]
        self.error: BaseException | None = None
        self.ends = 0

    def end(self) -> None:
        self.ends += 1

    @property
    def steps(self) -> list[Callable[[Callable[[int], None]], None]]:
        return [self._step(0), self._step(2)]

    def _step(self, first: int) -> Callable[[Callable[[int], None]], None]:
        def run(reach: Callable[[int], None]) -> None:
            for index, end in ((first, 5), (first + 1, 10)):
                assert self.may_go[index].wait(30)
                if self.error is not None and index == 2:
                    raise self.error
                reach(end)

        return run

    def let_go(self, count: int) -> None:
        for event in self.may_go[:count]:
            event.set()


@pytest.fixture
def held() -> Iterator[Held]:
    made = Held()
    yield made
    made.let_go(4)


def waits(walk: BackgroundStep, name: str) -> threading.Thread:
    thread = threading.Thread(target=walk.wait_for, args=([name],))
    thread.start()
    return thread


def test_nothing_is_waited_for_without_a_walk() -> None:
    walk = BackgroundStep()
    assert walk.has_passed("a")
    walk.wait_for(["a", "b"])
    walk.finish()
    assert not walk.is_under_way


def test_a_value_is_waited_for_until_it_is_new_and_no_longer(held: Held) -> None:
    walk = BackgroundStep()
    walk.start(held.steps, PLACES, held.end)
    assert not walk.has_passed("a")
    assert walk.has_passed("no value of the walk")
    waiting = waits(walk, "a")
    held.let_go(1)
    waiting.join(30)
    assert not waiting.is_alive()
    assert walk.has_passed("a")
    assert not walk.has_passed("b")
    assert walk.is_under_way
    held.let_go(4)
    walk.finish()
    assert walk.has_passed("c")


def test_the_next_walk_begins_anew(held: Held) -> None:
    walk = BackgroundStep()
    walk.start([lambda reach: reach(10)], {"a": (0, 10)}, held.end)
    walk.finish()
    walk.start(held.steps, PLACES, held.end)
    assert not walk.has_passed("a")
    held.let_go(4)
    walk.finish()


def test_a_walk_that_was_not_finished_is_not_forgotten() -> None:
    walk = BackgroundStep()
    walk.start([], {}, lambda: None)
    with pytest.raises(AssertionError):
        walk.start([], {}, lambda: None)
    walk.finish()


def test_an_error_reaches_who_waits_for_what_it_left_old_and_who_finishes(held: Held) -> None:
    walk = BackgroundStep()
    held.error = StoreError(5, "the drive is gone")
    walk.start(held.steps, PLACES, held.end)
    held.let_go(4)
    walk.wait_for(["b"])  # new before it failed
    for _ in range(2):
        with pytest.raises(StoreError, match="the drive is gone"):
            walk.wait_for(["c"])
    with pytest.raises(StoreError, match="the drive is gone"):
        walk.finish()
    assert held.ends == 1
    walk.finish()
    assert walk.has_passed("c")  # nothing is under way


def test_who_waits_when_it_fails_is_told(held: Held) -> None:
    walk = BackgroundStep()
    held.error = StoreError(5, "the drive is gone")
    walk.start(held.steps, PLACES, held.end)
    told: list[BaseException] = []

    def wait() -> None:
        try:
            walk.wait_for(["c"])
        except StoreError as error:
            told.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    held.let_go(4)
    waiting.join(30)
    assert told == [held.error]
    with pytest.raises(StoreError):
        walk.finish()


def test_an_error_of_the_end_is_the_walks(held: Held) -> None:
    walk = BackgroundStep()

    def fail() -> None:
        raise StoreError(28, "the drive is full")

    walk.start(held.steps, PLACES, fail)
    held.let_go(4)
    with pytest.raises(StoreError, match="the drive is full"):
        walk.finish()


def test_ctrl_c_ends_the_wait_and_not_the_walk(held: Held) -> None:
    walk = BackgroundStep()
    walk.start(held.steps, PLACES, held.end)
    main = threading.main_thread().ident

    def interrupt() -> None:
        wait_until(lambda: bool(walk._changed._waiters))  # type: ignore[attr-defined]
        signal.pthread_kill(main, signal.SIGINT)

    def finish_interrupted() -> None:
        threading.Thread(target=interrupt).start()
        walk.finish()

    with pytest.raises(KeyboardInterrupt):
        finish_interrupted()
    assert walk.is_under_way
    assert not walk.has_passed("a")
    held.let_go(4)
    walk.finish()
    assert held.ends == 1


def test_several_threads_may_wait_for_the_end(held: Held) -> None:
    walk = BackgroundStep()
    held.error = StoreError(5, "the drive is gone")
    walk.start(held.steps, PLACES, held.end)
    outcomes: list[str] = []

    def finish() -> None:
        try:
            walk.finish()
        except StoreError:
            outcomes.append("told")
        else:
            outcomes.append("over")

    threads = [threading.Thread(target=finish) for _ in range(4)]
    for thread in threads:
        thread.start()
    held.let_go(4)
    for thread in threads:
        thread.join(30)
    assert sorted(outcomes) == ["over", "over", "over", "told"]


def test_without_a_thread_nothing_has_begun(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = BackgroundStep()

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            walk.start(held.steps, PLACES, held.end)
    assert not walk.is_under_way
    walk.wait_for(["a"])
    walk.start(held.steps, PLACES, held.end)
    held.let_go(4)
    walk.finish()


def test_all_walks_have_one_thread_until_it_is_given_back(held: Held) -> None:
    walk, seen = BackgroundStep(), set()
    for _ in range(3):
        walk.start([lambda reach: seen.add(threading.get_ident())], {}, held.end)
        walk.finish()
    assert len(seen) == 1
    walk.close()
    assert not seen & {thread.ident for thread in threading.enumerate()}


def test_each_walk_makes_the_device_current_before_its_steps() -> None:
    calls: list[str] = []
    walk = BackgroundStep(lambda: calls.append(threading.current_thread().name))
    for _ in range(2):
        walk.start([lambda reach: calls.append("a step")], {}, lambda: None)
        walk.finish()
    assert calls == ["memascend-optimizer_0", "a step"] * 2


def test_a_walk_whose_device_cannot_be_made_current_ends_in_that_error() -> None:
    def refuse() -> None:
        raise RuntimeError("no such device")

    walk = BackgroundStep(refuse)
    walk.start([lambda reach: None], {}, lambda: None)
    with pytest.raises(RuntimeError, match="no such device"):
        walk.finish()


def test_time_is_counted_of_who_waits_for_values_or_for_the_end(held: Held) -> None:
    walk = BackgroundStep()
    walk.wait_for(["a"])
    walk.finish()
    assert walk.waited_s == 0.0
    walk.start(held.steps, PLACES, held.end)
    walk.wait_for(["no value of the walk"])
    assert walk.waited_s == 0.0
    held.let_go(4)
    walk.finish()
    assert walk.waited_s > 0.0


def test_a_walk_that_has_begun_when_ctrl_c_comes_is_waited_for(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = BackgroundStep()
    begun = threading.Event()
    submit = ThreadPoolExecutor.submit

    def submit_and_be_interrupted(thread: Any, function: Any, *arguments: Any) -> Any:
        future = submit(thread, function, *arguments)
        if function == walk._run:
            assert begun.wait(30)
            raise KeyboardInterrupt
        return future

    def first(reach: Callable[[int], None]) -> None:
        begun.set()
        held.steps[0](reach)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit_and_be_interrupted)
    with pytest.raises(KeyboardInterrupt):
        walk.start([first], PLACES, held.end)
    assert not walk.has_passed("a")
    held.let_go(4)
    walk.finish()
    assert held.ends == 1
    assert not walk.is_under_way


def test_after_ctrl_c_at_any_line_the_next_walk_is_made() -> None:
    made: list[tuple[BackgroundStep, list[str]]] = []

    def make() -> Callable[[], None]:
        walk, done = BackgroundStep(), list[str]()
        made[:] = [(walk, done)]

        def work() -> None:
            walk.start([lambda reach: reach(5)], PLACES, lambda: done.append("end"))
            walk.wait_for(["a"])
            walk.finish()
            walk.close()

        return work

    count = 0
    for places in interruptions(make):
        count += 1
        [(walk, done)] = made
        walk.finish()
        assert not walk.is_under_way, places
        before = len(done)
        walk.start([lambda reach: reach(5)], PLACES, lambda done=done: done.append("end"))
        walk.finish()
        assert len(done) == before + 1, places
        walk.close()
    assert count > 20
