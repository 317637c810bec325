"""Files that are made anew, appear whole, and never lead through a link that somebody planted."""

from __future__ import annotations

import errno
import glob
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path


def open_new(path: Path, mode: int = 0o666) -> int:
    """Return a descriptor of a file that was not there, open for writing.

    Args:
        path: Of the file; nothing may have the name, not even a link to nowhere.
        mode: Of the file, less what the umask takes.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, mode)


def open_anew(path: Path) -> int:
    """Return a descriptor of a new file in the place of the file or link that had the name."""
    path.unlink(missing_ok=True)
    return open_new(path)


def write_durably(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Make a file of text, where none is, that is on the drive on return."""
    with open(open_new(path, mode), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Put a file of text in the place of the file or link that has the name, in one step.

    It is written beside that under a name that nobody can foresee. What killed processes left of
    this is removed: let one at a time replace a path.

    Args:
        path: Of the file.
        text: What it holds.
        mode: Of the new file, less what the umask takes.

    Raises:
        OSError: The file system refused; what was there before still is.
    """
    beginning = f".memascend-{path.name}."
    for left in path.parent.glob(f"{glob.escape(beginning)}*.new"):
        with suppress(OSError):
            if left.lstat().st_uid == os.geteuid():
                left.unlink()
    staged = path.with_name(f"{beginning}{secrets.token_hex(8)}.new")
    try:
        write_durably(staged, text, mode=mode)
        os.replace(staged, path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    sync(path.parent)


def replace_whole(path: Path, text: str) -> None:
    """Put a file of text in the place of the one that has the name, in one step.

    As `replace_durably`, but for what is written again and again, and need not survive the machine:
    nothing waits for the drive. One process at a time writes a path.

    Raises:
        OSError: The file system refused; what was there before still is.
    """
    staged = path.with_name(f".memascend-{path.name}.new")
    try:
        with open(open_anew(staged), "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(staged, path)
    except BaseException:
        with suppress(OSError):
            staged.unlink(missing_ok=True)
        raise


def is_replaceable(path: Path) -> bool:
    """Tell if nothing or a plain file has a name: no link, folder or device."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return True


def sync(path: Path) -> None:
    """Make a file, or the entries of a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems know no fsync of a folder.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)
