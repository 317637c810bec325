"""Locks between processes; the kernel takes them back from one that has ended.

Whoever may read a file can lock it, and whoever may read a folder can lock that. So a lock that
others of the machine must not hold is on a file which this user alone can open.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

_POLL_S = 0.02


def lock_within(descriptor: int, seconds: float) -> bool:
    """Take the lock for this process alone; return False where another has it for so long.

    Raises:
        OSError: The file system knows no locks.
    """
    end = monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if monotonic() > end:
                return False
            sleep(_POLL_S)
        else:
            return True


def take_lock_file(path: Path, seconds: float) -> int | None:
    """Take the lock of a file that is there only while somebody has the lock, or was killed.

    Returns:
        A descriptor for `release_lock_file`; None where another process has it for so long.

    Raises:
        OSError: The file system knows no locks, or what has the name is not this user's own file.
    """
    end = monotonic() + seconds
    while True:
        descriptor = _open_own(path)
        if descriptor is not None and _lock_or_close(descriptor, path, end - monotonic()):
            return descriptor
        if monotonic() > end:
            return None


def release_lock_file(descriptor: int, path: Path) -> None:
    """Remove the file, then give the lock back: whoever waits for it makes a new file."""
    with suppress(OSError):
        if _is_named(descriptor, path):
            path.unlink()
    # A child that another thread forked meanwhile has the descriptor, and would keep the lock.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _open_own(path: Path) -> int | None:
    """Open a file for this user alone, made where it is missing; None if it was removed meanwhile.

    Raises:
        OSError: What has the name is a link, no file, or somebody else's.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        # Ours, whoever a network share says that it belongs to.
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        pass
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        return None
    state = os.fstat(descriptor)
    is_file = stat.S_ISREG(state.st_mode) and state.st_nlink <= 1
    if not is_file or state.st_uid != os.geteuid():
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "it is not this user's own lock file", str(path))
    with suppress(OSError):  # a file system without modes
        os.fchmod(descriptor, 0o600)  # after somebody's chmod of all that is in the folder
    return descriptor


def _lock_or_close(descriptor: int, path: Path, seconds: float) -> bool:
    """Lock a file that still has its name: who had the lock before has removed that file."""
    is_taken = False
    try:
        is_taken = lock_within(descriptor, seconds) and _is_named(descriptor, path)
    except OSError:
        path.unlink(missing_ok=True)  # of no use to anybody where there are no locks
        raise
    finally:
        if not is_taken:
            os.close(descriptor)
    return is_taken


def _is_named(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False
