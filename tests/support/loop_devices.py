"""Real devices, file systems and control groups that fail on demand, for tests that need root.

What the machine does not allow skips the test, with the reason. Everything is undone in the end,
and nothing is touched that was not made here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
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


#: Of linux/ext4.h: no operation works from then on, as when the drive below is gone.
_EXT4_SHUTDOWN = 0x8004587D
_SHUTDOWN_WITHOUT_LOG = 2
#: Of linux/fs.h.
_FREEZE = 0xC0045877
_THAW = 0xC0045878
_UNMOUNT_TRIES = 50


@contextlib.contextmanager
def mounted(
    source: str, folder: Path, *options: str, kind: str = "ext4", make: Sequence[str] = ()
) -> Iterator[Path]:
    """A device with a new file system, or "tmpfs", in a new folder while the context lasts."""
    folder.mkdir()
    if source == "tmpfs":
        kind = source
    else:
        run(f"mkfs.{kind}", "-q", *make, source)
    run("mount", "-t", kind, *(f"-o{option}" for option in options), source, str(folder))
    try:
        yield folder
    finally:
        # Files of a store that was just closed may take the kernel a moment.
        for _ in range(_UNMOUNT_TRIES):
            if subprocess.run([tool("umount"), str(folder)], capture_output=True).returncode == 0:
                break
            time.sleep(0.1)
        else:
            raise AssertionError(f"{folder} is in use: a file was leaked")


def shut_down(folder: Path) -> None:
    """Makes a mounted ext4 fail as one whose drive was pulled out."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, _EXT4_SHUTDOWN, struct.pack("I", _SHUTDOWN_WITHOUT_LOG))
    except OSError as error:
        pytest.skip(f"this kernel does not shut an ext4 down: {error}")
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def frozen(folder: Path) -> Iterator[None]:
    """A mounted file system that lets whoever changes it wait, as one that is very slow."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, _FREEZE, 0)
        try:
            yield
        finally:
            fcntl.ioctl(descriptor, _THAW, 0)
    finally:
        os.close(descriptor)


def make_read_only(device: str) -> None:
    """Makes a mounted ext4 (with errors=remount-ro) read-only as after an error of its drive."""
    trigger = Path("/sys/fs/ext4", Path(device).name, "trigger_fs_error")
    try:
        trigger.write_text("memascend test")
    except OSError as error:
        pytest.skip(f"this kernel does not trigger an error of ext4: {error}")


@contextlib.contextmanager
def control_group(controller: str) -> Iterator[Path]:
    """A new group of version 1, with one controller."""
    group = Path("/sys/fs/cgroup", controller, f"memascend-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group of version 1 can be made here: {error}")
    try:
        yield group
    finally:
        for _ in range(_UNMOUNT_TRIES):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)
        else:
            raise AssertionError(f"{group} is still in use")


@contextlib.contextmanager
def mapped_device(device: str, name: str) -> Iterator[str]:
    """A device-mapper device over another, which `map_to_error` makes fail."""
    sectors = run("blockdev", "--getsz", device)
    with _mapping(name, f"0 {sectors} linear {device} 0") as path:
        yield path


@contextlib.contextmanager
def encrypted_device(device: str, name: str) -> Iterator[str]:
    """A dm-crypt device over another, with a key that nobody has afterwards."""
    sectors, key = run("blockdev", "--getsz", device), os.urandom(64).hex()
    with _mapping(name, f"0 {sectors} crypt aes-xts-plain64 {key} 0 {device} 0") as path:
        yield path


@contextlib.contextmanager
def _mapping(name: str, table: str) -> Iterator[str]:
    run("dmsetup", "create", name, "--noudevsync", "--table", table)
    try:
        run("dmsetup", "mknodes", name)
        yield f"/dev/mapper/{name}"
    finally:
        subprocess.run([tool("dmsetup"), "remove", "--retry", name], check=False)


def map_to_error(device: str) -> None:
    """From now on every request of a mapped device fails."""
    sectors = run("blockdev", "--getsz", device)
    name = Path(device).name
    run("dmsetup", "suspend", "--noflush", "--noudevsync", name)
    run("dmsetup", "reload", "--table", f"0 {sectors} error", name)
    run("dmsetup", "resume", "--noudevsync", name)
