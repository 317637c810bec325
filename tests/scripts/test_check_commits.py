"""A commit says what it does in a line, and why below it."""

from __future__ import annotations

import pytest

from tests.support.scripts import load_script

check = load_script("check_commits")


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("area: do a thing\n\nSince it helps.\n", ""),
        (f"{'x' * 72}\n\nSince it helps.", ""),
        (f"{'x' * 73}\n\nSince it helps.", "a subject of 73 characters"),
        ("area: do a thing\n", "no body that says why"),
    ],
)
def test_a_message_is_a_short_subject_and_a_reason(message: str, told: str) -> None:
    assert check.mistake(message).startswith(told)
    assert bool(check.mistake(message)) == bool(told)
