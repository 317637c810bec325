"""A thread is prepared on itself, before anything else runs on it."""

from __future__ import annotations

import threading

import pytest

from memascend.base.threads import new_thread


def test_a_thread_is_prepared_once_and_first() -> None:
    calls: list[tuple[str, str]] = []

    def note(what: str) -> None:
        calls.append((what, threading.current_thread().name))

    thread = new_thread("ours", lambda: note("prepare"))
    for _ in range(2):
        thread.submit(note, "work").result()
    thread.shutdown()
    assert calls == [("prepare", "ours_0"), ("work", "ours_0"), ("work", "ours_0")]


def test_who_asks_for_a_thread_is_told_why_it_cannot_be_prepared() -> None:
    def refuse() -> None:
        raise RuntimeError("no such device")

    with pytest.raises(RuntimeError, match="no such device"):
        new_thread("ours", refuse)
