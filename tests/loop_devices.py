"""Loop devices for tests of raw volumes; where none can be made a test says why it is skipped."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SBIN = "/usr/sbin:/sbin:/usr/bin:/bin"
DEVICE_BYTES = 128 << 20


def tool(name: str) -> str:
    """Where a program is, or skips the test."""
    program = shutil.which(name, path=SBIN)
    if program is None:
        pytest.skip(f"{name} is not installed")
    return program


def run(*words: str) -> str:
    """Runs a program; skips the test where it fails, since it is the machine's to allow it."""
    done = subprocess.run([tool(words[0]), *words[1:]], capture_output=True, text=True, input="")
    if done.returncode != 0:
        pytest.skip(f"{words[0]} is not allowed or not possible here: {done.stderr.strip()[:200]}")
    return done.stdout.strip()


@contextlib.contextmanager
def loop_device(
    folder: Path, *, nbytes: int = DEVICE_BYTES, read_only: bool = False
) -> Iterator[str]:
    """A device over a new sparse file, for as long as the context lasts."""
    image = folder / f"{len(list(folder.iterdir()))}.image"
    with image.open("wb") as file:
        file.truncate(nbytes)
    flags = ["--read-only"] if read_only else []
    path = run("losetup", "--find", "--show", *flags, str(image))
    try:
        yield path
    finally:
        subprocess.run([tool("losetup"), "--detach", path], check=False, capture_output=True)
