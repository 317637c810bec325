"""Creates and replaces files in one step, and never writes through a link planted by others."""

from __future__ import annotations

import errno
import glob
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path


def open_new(path: Path, mode: int = 0o666) -> int:
    """Create a file and return its descriptor, open for writing.

    No entry may have the name, not even a dangling link.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, mode)


def open_anew(path: Path) -> int:
    """Return a descriptor of a new file; an existing file or link of that name is removed."""
    path.unlink(missing_ok=True)
    return open_new(path)


def write_durably(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Create a file with a text; on return it is on the drive."""
    with open(open_new(path, mode), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Replace the file or link at a path, or create a file, in one step.

    The text is first written to a file beside it with a random name. Such files that killed
    processes left behind are removed, so one process at a time may replace a path.

    Raises:
        OSError: The file system refused; the old file is unchanged.
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
    """Replace the file at a path, or create it, in one step, without waiting for the drive.

    For files that are written often and need not survive a crash of the machine. One process at a
    time may write a path.

    Raises:
        OSError: The file system refused; the old file is unchanged.
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
    """Return True if a path is a plain file or does not exist; False for a link, folder, device."""
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
        # Some network file systems do not support fsync of a folder.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)
