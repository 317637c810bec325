"""The guess that a step may begin during backward, from what came of the steps before."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import pytest

from memascend.deepspeed.optimizer.guess import WATCHED_COUNT, WITHIN_COUNT, WRONG_SHARE_MAX, Guess
from memascend.deepspeed.optimizer.worth import Worth


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 0)


def follow(guess: Guess, norms: Iterable[bool]) -> list[bool]:
    """Note steps; return which of them were guessed."""
    guessed = []
    for is_within in norms:
        wants = guess.wants()
        guessed.append(wants)
        guess.note(is_within=is_within, was_guessed=wants, was_right=wants and is_within)
    return guessed


def test_a_step_is_guessed_when_those_before_it_were_within_the_limit() -> None:
    guess = Guess()
    found = follow(guess, [True] * WITHIN_COUNT + [True, False, True, True, True, True, True])
    assert found == [False] * WITHIN_COUNT + [True, True] + [False] * 4 + [True]
    assert (guess.counts.right, guess.counts.wrong) == (2, 1)


def test_a_run_that_always_clips_is_never_guessed() -> None:
    guess = Guess()
    assert not any(follow(guess, [False] * 100))
    assert (guess.counts.right, guess.counts.wrong) == (0, 0)


def test_after_wrong_guesses_alone_there_are_none_until_they_are_long_past() -> None:
    guess = Guess()
    cycle = [True] * WITHIN_COUNT + [False]
    found = follow(guess, cycle * 8)
    assert guess.counts.wrong == 2 == sum(found)
    quiet = follow(guess, [True] * WATCHED_COUNT)
    first = quiet.index(True)
    assert WITHIN_COUNT < first < WATCHED_COUNT
    assert all(quiet[first:])


def test_few_wrong_guesses_among_many_right_ones_do_not_end_them() -> None:
    guess = Guess()
    follow(guess, [True] * WATCHED_COUNT)
    cycle = [True] * (WITHIN_COUNT + 15) + [False]
    found = follow(guess, cycle * 20)
    assert guess.counts.wrong == 20
    assert sum(found[-len(cycle) :]) == 16 > 1 / WRONG_SHARE_MAX


@pytest.mark.parametrize("was_guessed", [False, True])
def test_a_guess_that_came_to_nothing_counts_as_wrong(was_guessed: bool) -> None:
    guess = Guess()
    guess.note(is_within=True, was_guessed=was_guessed, was_right=False)
    assert guess.counts.wrong == was_guessed


def measured(*, early_s: float, walk_s: float = 1.0, wrong_s: float = 2.0) -> Guess:
    """Return a guess of a run whose steps were measured: those after backward took 2 s."""
    now_s = 0.0
    guess, was_used = Guess(Worth(lambda: now_s)), False
    for _ in range(24):
        wants = guess.wants()
        now_s += (early_s if was_used else wrong_s) if wants else 2.0 - walk_s * was_used
        guess.note(is_within=True, was_guessed=wants, was_right=wants)
        was_used = wants
    return guess


def test_guesses_end_when_they_turn_out_not_to_pay(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "memascend"):
        guess = measured(early_s=2.0)
    assert guess.is_over
    assert not any(follow(guess, [True] * 10))
    assert caplog.text.count("stay after backward") == 1


def test_guesses_go_on_when_they_pay(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "memascend"):
        guess = measured(early_s=1.0)
    assert not guess.is_over
    assert all(follow(guess, [True] * 10))
    assert caplog.text.count("begin during backward") == 1


def test_what_wrong_guesses_cost_decides_how_many_there_may_be() -> None:
    cheap, dear = measured(early_s=1.8), measured(early_s=1.8, wrong_s=12.0)
    cycle = [True] * (WITHIN_COUNT + 11) + [False]
    guessed = []
    for guess in (cheap, dear):
        follow(guess, [True] * WATCHED_COUNT)
        guessed.append(sum(follow(guess, cycle * 20)))
    assert guessed[0] == 20 * 12 + WITHIN_COUNT
    assert 0 < guessed[1] < guessed[0] / 2
