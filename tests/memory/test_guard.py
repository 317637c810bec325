"""Who may call: the thread that holds the lock, and no other one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest

from memascend.memory.guard import Guard, guarded
from memascend.memory.pool import Pool
from memascend.streaming.gradients.stream import GradientStream
from memascend.streaming.parameters.stream import ParameterStream
from memascend.transfer.staging import StagingSlots


class Owner:
    def __init__(self, guard: Guard | None) -> None:
        self.guard = guard

    @guarded
    def double(self, number: int, *, more: int = 0) -> int:
        """Doubles."""
        return 2 * number + more


def error_on(name: str, lock: AbstractContextManager[object], owner: Owner) -> str:
    """What a thread of this name meets that calls under a lock; empty if it may."""
    found = [""]

    def call() -> None:
        with lock:
            try:
                owner.double(3)
            except AssertionError as error:
                found[0] = str(error)

    thread = threading.Thread(target=call, name=name)
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_with_the_lock_may_call_as_often_as_it_likes() -> None:
    lock = threading.RLock()
    owner = Owner(Guard(lock))
    with lock, lock:
        assert owner.double(3, more=1) == 7
    assert error_on("device", lock, owner) == ""
    assert owner.double.__doc__ == "Doubles."


def test_the_error_names_the_call_the_thread_and_the_remedy() -> None:
    lock = threading.RLock()
    owner = Owner(Guard(lock))
    named = r"Owner\.double\(\).*'MainThread'.*with runtime\.lock"
    with pytest.raises(AssertionError, match=named):
        owner.double(3)
    assert "'device'" in error_on("device", nullcontext(), owner)


def test_the_lock_in_another_threads_hands_does_not_help() -> None:
    lock = threading.RLock()
    owner = Owner(Guard(lock))
    with lock:
        assert "Owner.double()" in error_on("host", nullcontext(), owner)


def test_without_a_guard_nothing_is_checked() -> None:
    assert Owner(None).double(3) == 6


@pytest.mark.parametrize(
    "method",
    [
        StagingSlots.take,
        StagingSlots.submit,
        StagingSlots.give_back,
        StagingSlots.wait_writes,
        Pool.acquire,
        GradientStream.make_final,
        GradientStream.get,
        ParameterStream.read_now,
        ParameterStream.let_go,
    ],
)
def test_what_moves_slots_is_guarded(method: Callable[..., object]) -> None:
    class Held:
        guard = Guard(threading.RLock())

    with pytest.raises(AssertionError, match=method.__qualname__.replace(".", r"\.")):
        method(Held())
