"""The guess that a norm is within the limit, from the norms of earlier steps."""

from __future__ import annotations

import pytest

from memascend.deepspeed.optimizer.guess import (
    WATCHED_COUNT,
    WITHIN_COUNT,
    WRONG_COUNT_MAX,
    ClipGuess,
)


def follow(guess: ClipGuess, norms: list[bool]) -> list[bool]:
    """Note steps; return which of them were guessed."""
    guessed = []
    for is_within in norms:
        wants = guess.wants()
        guessed.append(wants)
        guess.note(is_within=is_within, was_guessed=wants, was_right=wants and is_within)
    return guessed


def test_a_step_is_guessed_when_those_before_it_were_within_the_limit() -> None:
    guess = ClipGuess()
    found = follow(guess, [True] * WITHIN_COUNT + [True, False, True, True, True, True, True])
    assert found == [False] * WITHIN_COUNT + [True, True] + [False] * 4 + [True]
    assert (guess.counts.right, guess.counts.wrong) == (2, 1)


def test_a_run_that_always_clips_is_never_guessed() -> None:
    guess = ClipGuess()
    assert not any(follow(guess, [False] * 100))
    assert (guess.counts.right, guess.counts.wrong) == (0, 0)


def test_after_many_wrong_guesses_there_are_none_until_they_are_long_past() -> None:
    guess = ClipGuess()
    cycle = [True] * WITHIN_COUNT + [False]
    found = follow(guess, cycle * WRONG_COUNT_MAX)
    assert guess.counts.wrong == WRONG_COUNT_MAX == sum(found)
    quiet = follow(guess, [True] * WATCHED_COUNT)
    first = quiet.index(True)
    assert WITHIN_COUNT < first < WATCHED_COUNT
    assert all(quiet[first:])


@pytest.mark.parametrize("was_guessed", [False, True])
def test_a_guess_that_came_to_nothing_counts_as_wrong(was_guessed: bool) -> None:
    guess = ClipGuess()
    guess.note(is_within=True, was_guessed=was_guessed, was_right=False)
    assert guess.counts.wrong == was_guessed
