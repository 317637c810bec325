"""Another user of the same machine, for tests that run as root."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

OTHER_UID = 65534


@contextlib.contextmanager
def open_folder(mode: int = 0o755) -> Iterator[Path]:
    """A new folder that other users can reach, which pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="memascend-test-") as name:
        os.chmod(name, mode)
        yield Path(name)


@contextlib.contextmanager
def another_user(action: Callable[[], Any]) -> Iterator[Any]:
    """Another user does something, and lives on with what it opened until the context ends.

    Gives what the action returned, or the OSError that it raised. Skips the test without root.
    """
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()

    def run() -> None:
        mine.close()  # or it would outlive a test run that is killed
        os.setgroups([])
        os.setgid(OTHER_UID)
        os.setuid(OTHER_UID)
        try:
            theirs.send(action())
        except OSError as error:
            theirs.send(error)
        with contextlib.suppress(EOFError):
            theirs.recv()

    process = context.Process(target=run)
    process.start()
    theirs.close()  # so that a child that failed otherwise is not waited for
    try:
        assert mine.poll(60), "the other user did not come to an end"
        yield mine.recv()
    finally:
        mine.close()
        process.join()


def hold_lock(path: Path) -> bool:
    """Take the lock of a file or folder that one may read; whether that was possible."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
