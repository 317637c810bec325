"""One thread at a time, and Ctrl-C in the middle of a call."""

from __future__ import annotations

import threading

import pytest

from memascend.deepspeed.parameters.exclusive import exclusive


class Owner:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.recovered = 0
        self.is_interrupted = False
        self.is_hasty = False

    def recover(self) -> None:
        if self.is_hasty:
            self.is_hasty = False
            raise KeyboardInterrupt
        self.recovered += 1

    @exclusive
    def double(self, number: int, *, error: BaseException | None = None) -> int:
        """Doubles."""
        assert not self.is_free()
        if error is not None:
            raise error
        return 2 * number

    @exclusive
    def nested(self) -> int:
        return self.double(3)

    def is_free(self) -> bool:
        """Whether another thread would get in."""
        free: list[bool] = []

        def try_it() -> None:
            free.append(self.lock.acquire(blocking=False))
            if free[0]:
                self.lock.release()

        thread = threading.Thread(target=try_it)
        thread.start()
        thread.join()
        return free[0]


def test_a_call_keeps_others_out_and_lets_its_own_thread_in() -> None:
    owner = Owner()
    assert owner.nested() == 6
    assert owner.is_free()
    assert owner.double.__doc__ == "Doubles."


@pytest.mark.parametrize(
    ("error", "recovered"), [(ValueError(), 0), (KeyboardInterrupt(), 1), (SystemExit(), 1)]
)
def test_only_an_interruption_lets_everything_go(error: BaseException, recovered: int) -> None:
    owner = Owner()
    with pytest.raises(type(error)):
        owner.double(1, error=error)
    assert owner.recovered == recovered
    assert owner.is_free()


def test_what_a_second_ctrl_c_has_left_is_let_go_by_the_next_call() -> None:
    owner = Owner()
    owner.is_hasty = True
    with pytest.raises(KeyboardInterrupt):
        owner.double(1, error=KeyboardInterrupt())
    assert (owner.recovered, owner.is_free()) == (0, True)
    assert owner.double(3) == 6
    assert owner.recovered == 1
    owner.double(3)
    assert owner.recovered == 1
