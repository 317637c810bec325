"""Locks are waited for, for so long and no longer."""

from __future__ import annotations

import fcntl
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from memascend.system import locks
from memascend.system.locks import lock_within, release_lock_file, take_lock_file


def test_a_lock_is_had_by_one_alone_and_waited_for(tmp_path: Path) -> None:
    mine, other = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    assert lock_within(mine, 0)
    assert not lock_within(other, 0)
    assert not lock_within(other, 0.05)
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(lock_within(other, 60)))
    waiting.start()
    os.close(mine)
    waiting.join()
    assert found == [True]
    os.close(other)


def test_a_lock_file_is_for_its_owner_alone_and_there_while_it_is_held(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    descriptor = take_lock_file(path, 0)
    assert descriptor is not None
    assert path.stat().st_mode & 0o777 == 0o600
    assert take_lock_file(path, 0) is None
    release_lock_file(descriptor, path)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_file_that_a_killed_process_left_binds_nobody(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch(mode=0o644)  # and somebody made all files readable
    descriptor = take_lock_file(path, 0)
    assert descriptor is not None
    assert path.stat().st_mode & 0o777 == 0o600
    release_lock_file(descriptor, path)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_the_lock_of_a_file_that_lost_its_name_is_not_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    """Who waited for a lock finds it free, and the file removed by who had it."""
    path = tmp_path / "lock"

    def locked_too_late(descriptor: int, operation: int) -> None:
        monkeypatch.undo()
        path.unlink()
        if is_replaced:
            others.append(take_lock_file(path, 0))
        fcntl.flock(descriptor, operation)

    others: list[int | None] = []
    monkeypatch.setattr(fcntl, "flock", locked_too_late)
    descriptor = take_lock_file(path, 0.05 if is_replaced else 60)
    if is_replaced:
        assert descriptor is None
        assert others != [None]
    else:
        assert descriptor is not None
        assert os.path.samestat(os.fstat(descriptor), path.stat())


def test_a_lock_file_of_another_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    mine = take_lock_file(path, 0)
    path.unlink()  # by hand
    other = take_lock_file(path, 0)
    assert mine is not None
    assert other is not None
    release_lock_file(mine, path)
    assert path.exists()
    release_lock_file(other, path)
    assert not path.exists()


@pytest.mark.parametrize("kind", ["symlink", "hard link", "fifo", "folder"])
def test_what_is_no_lock_file_is_refused_and_left(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "lock"
    (tmp_path / "victim").touch(mode=0o644)
    make = {
        "symlink": lambda: path.symlink_to("victim"),
        "hard link": lambda: path.hardlink_to(tmp_path / "victim"),
        "fifo": lambda: os.mkfifo(path),
        "folder": lambda: path.mkdir(),
    }
    make[kind]()
    with pytest.raises(OSError, match="lock"):
        take_lock_file(path, 0)
    assert os.path.lexists(path)
    assert (tmp_path / "victim").stat().st_mode & 0o777 == 0o644


def test_a_lock_file_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    path.touch(mode=0o666)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(PermissionError):
        take_lock_file(path, 0)


@pytest.mark.parametrize("call", ["open", "fstat", "stat", "flock", "monotonic"])
@pytest.mark.parametrize("count", [1, 2])
def test_no_file_is_left_where_the_handler_of_a_signal_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, count: int
) -> None:
    """Handlers run when a call returns; its result is lost then."""
    path = tmp_path / "lock"
    owner: Any = {"flock": fcntl, "monotonic": locks}.get(call, os)
    original = getattr(owner, call)
    calls = 0

    def interrupted(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        result = original(*arguments, **keywords)
        if calls == count:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, call, interrupted)
    with suppress(KeyboardInterrupt):
        descriptor = take_lock_file(path, 0)
        assert descriptor is not None
        release_lock_file(descriptor, path)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    assert calls >= count or (call, count) == ("open", 2)


def test_many_threads_never_have_one_lock_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    inside: list[int] = []
    most = 0

    def work() -> None:
        nonlocal most
        for _ in range(100):
            descriptor = take_lock_file(path, 60)
            assert descriptor is not None
            inside.append(descriptor)
            most = max(most, len(inside))
            inside.remove(descriptor)
            release_lock_file(descriptor, path)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert not path.exists()
