"""Locks between processes, which the kernel releases when a process ends.

Read permission on a file or folder is enough to lock it. So a lock that must not be held by other
users is on a file that only this user can open.
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
    """Take the exclusive lock; return False if another process holds it for so many seconds."""
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
    """Take the lock of a file that exists only while a process holds the lock, or was killed.

    The descriptor is for `release_lock_file`; None if another process holds it for so many seconds.
    A signal's handler may raise at any moment, of Ctrl-C or one that exits: no file is left then.

    Raises:
        OSError: The file system does not support locks, or the path is not this user's own file.
    """
    try:
        return _take(path, monotonic() + seconds)
    except Exception:
        raise
    except BaseException:  # also while the file was created: its descriptor is lost
        with suppress(OSError):
            if (descriptor := _take(path, monotonic())) is not None:
                release_lock_file(descriptor, path)
        raise


def release_lock_file(descriptor: int, path: Path) -> None:
    """Remove the file, then release the lock; a waiting process then creates a new file."""
    try:
        _remove_name(descriptor, path)
    except BaseException:  # a signal's handler raised before the file was removed
        _remove_name(descriptor, path)
        raise
    finally:
        # A child that another thread forked may have the descriptor, and would keep the lock.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _take(path: Path, end: float) -> int | None:
    while True:
        descriptor = _open_own(path)
        if descriptor is not None and _lock_or_close(descriptor, path, end - monotonic()):
            return descriptor
        if monotonic() > end:
            return None


def _open_own(path: Path) -> int | None:
    """Open the lock file, or create it for this user alone; None if it was removed meanwhile."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        # A file that we create is ours, even if a network share reports another owner.
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
        os.fchmod(descriptor, 0o600)  # undoes a chmod of all files in the folder
    return descriptor


def _lock_or_close(descriptor: int, path: Path, seconds: float) -> bool:
    """Lock the file; False if it has lost its name, as the last holder removes it."""
    is_taken = False
    try:
        is_taken = lock_within(descriptor, seconds) and _is_named(descriptor, path)
    except OSError:
        path.unlink(missing_ok=True)  # useless on a file system without locks
        raise
    finally:
        if not is_taken:
            os.close(descriptor)
    return is_taken


def _remove_name(descriptor: int, path: Path) -> None:
    with suppress(OSError):
        if _is_named(descriptor, path):
            path.unlink()


def _is_named(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False
