"""Raw block devices as volumes: inspected, claimed, formatted and wiped.

Nothing here writes to a device that carries any data but our own header, or that is in use. A
device is inspected through a descriptor that then stays open: its O_EXCL keeps mounts, RAID, LVM
and other claims away from then on, and its flock other runs of memascend.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memascend import _core
from memascend.base.progress import Advance
from memascend.base.units import format_nbytes
from memascend.errors import StoreError
from memascend.system.locks import lock_within
from memascend.system.mounts import (
    PROC,
    SYSFS,
    device_name,
    device_number,
    read_line,
    read_lines,
    read_mounts,
    unescaped,
)
from memascend.volumes.header import (
    DEVICE_BYTES_MIN,
    HEADER_BYTES,
    START_BYTES,
    Header,
    HeaderError,
    new_header,
    parse,
)
from memascend.volumes.signatures import ask_blkid, find_signatures

_BLKROGET, _BLKSSZGET, _BLKDISCARD = 0x125E, 0x1268, 0x1277
_LOCK_SECONDS = 2.0  # udev opens a device for a moment each time it was closed
_SECTOR_BYTES_MAX = 4096
#: Bytes of one discard, so that the progress on a large device can be shown.
DISCARD_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Device:
    """An opened block device."""

    path: str  # path, with symbolic links resolved
    descriptor: int  # open until the context manager that gave the device ends
    size_bytes: int

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return bytes of the device, fewer at its end; raise StoreError if it fails."""
        try:
            return os.pread(self.descriptor, nbytes, offset)
        except OSError as error:
            raise _failed(self.path, "read", error) from error

    def header(self) -> Header | None:
        """Return our header, None if the device has none.

        Raises:
            StoreError: The header is damaged.
        """
        try:
            return parse(self.read(0, HEADER_BYTES), device_bytes=self.size_bytes)
        except HeaderError as error:
            raise refusal(
                self.path,
                errno.EINVAL,
                str(error),
                f"if nothing on it is needed: wipefs --all {self.path}; then memascend volume "
                f"format {self.path}",
            ) from error

    def discard(self, advance: Advance | None = None) -> bool:
        """Discard all data of the device; return False if it does not support discard."""
        for offset in range(0, self.size_bytes, DISCARD_BYTES):
            nbytes = min(DISCARD_BYTES, self.size_bytes - offset)
            try:
                fcntl.ioctl(self.descriptor, _BLKDISCARD, struct.pack("=QQ", offset, nbytes))
            except OSError:
                return False
            if advance is not None:
                advance(nbytes)
        return True

    def erase(self, header: bytes) -> None:
        """Overwrite the start and the end, where signatures are, then write the header.

        Raises:
            StoreError: The device failed.
        """
        try:
            self._write(START_BYTES, bytes(START_BYTES))
            self._write(self.size_bytes - START_BYTES, bytes(START_BYTES))
            self._write(0, header.ljust(START_BYTES, b"\0"))
            os.fsync(self.descriptor)
        except OSError as error:
            raise _failed(self.path, "written", error) from error

    def _write(self, offset: int, content: bytes) -> None:
        while content:
            written = os.pwrite(self.descriptor, content, offset)
            content, offset = content[written:], offset + written


@contextlib.contextmanager
def claimed(path: str) -> Iterator[Device]:
    """Open a device for this process alone.

    Raises:
        StoreError: Not a block device, in use, read-only, too small, or its sectors are too large.
    """
    path = os.path.realpath(path)
    users = find_users(path)
    if users:
        raise _busy(path, "; ".join(users))
    flags = os.O_RDWR | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    with _opened(path, flags) as device:
        if not lock_within(device.descriptor, _LOCK_SECONDS):
            raise _busy(path, "another process has locked it")
        read_only, sector = (
            struct.unpack("i", fcntl.ioctl(device.descriptor, request, bytes(4)))[0]
            for request in (_BLKROGET, _BLKSSZGET)
        )
        if read_only:
            raise refusal(path, errno.EROFS, "it is read-only", f"blockdev --setrw {path}")
        if sector > _SECTOR_BYTES_MAX:
            raise refusal(
                path, errno.EINVAL, f"its sectors have {sector} bytes", "use a directory on it"
            )
        if device.size_bytes < DEVICE_BYTES_MIN:
            raise refusal(
                path,
                errno.ENOSPC,
                f"it has {format_nbytes(device.size_bytes)}, less than "
                f"{format_nbytes(DEVICE_BYTES_MIN)}",
                "name a larger device",
            )
        yield device


@contextlib.contextmanager
def formatted(path: str, *, needed_bytes: int = 0) -> Iterator[tuple[Device, Header]]:
    """Open a device with our header and room for `needed_bytes`, for a run of this process alone.

    Raises:
        StoreError: As `claimed`; or it has no header of ours, is another user's, or too small.
    """
    with claimed(path) as device:
        header = device.header()
        if header is None:
            found = signatures(device)
            cause = "it has no header of memascend"
            if found:
                cause += f", but {', '.join(found)}"
            raise refusal(device.path, errno.EINVAL, cause, _how_to_format(device.path, found))
        if os.geteuid() not in (0, header.owner_uid):
            raise refusal(
                device.path,
                errno.EPERM,
                f"it was formatted for user {header.owner_uid}, and this is {os.geteuid()}",
                f"as its owner: memascend volume wipe {device.path}; then format it anew",
            )
        if header.size_bytes - START_BYTES < needed_bytes:
            raise refusal(
                device.path,
                errno.ENOSPC,
                f"it holds {header.size_bytes - START_BYTES} bytes, less than the {needed_bytes} "
                "wanted",
                "state a smaller capacity, or name a larger device",
            )
        yield device, header


def format_device(device: Device, *, owner_uid: int, advance: Advance | None = None) -> Header:
    """Write our header, for runs of `owner_uid`, to a claimed device without other data.

    Raises:
        StoreError: The device carries other data; nothing was changed.
    """
    if device.header() is None and (found := signatures(device)):
        raise refusal(
            device.path,
            errno.EEXIST,
            f"it carries {', '.join(found)}",
            _how_to_format(device.path, found),
        )
    header = new_header(device_bytes=device.size_bytes, owner_uid=owner_uid)
    device.discard(advance)
    device.erase(header.pack())
    return header


def wipe_device(device: Device, advance: Advance | None = None) -> bool:
    """Remove our header from a claimed device; return False if its data has to be overwritten.

    All data is discarded if the device supports that.

    Raises:
        StoreError: The device has no header of ours; nothing was changed.
    """
    if device.header() is None:
        raise refusal(
            device.path, errno.EINVAL, "it has no header of memascend", "there is nothing to wipe"
        )
    discarded = device.discard(advance)
    device.erase(b"")
    return discarded


@contextlib.contextmanager
def looked_at(path: str) -> Iterator[Device]:
    """Open a device for reading, even while other programs use it.

    Raises:
        StoreError: Not a block device, or it cannot be read.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    with _opened(os.path.realpath(path), flags) as device:
        yield device


def signatures(device: Device) -> list[str]:
    """Return the signatures of other data on the device."""
    return find_signatures(device.read, device.size_bytes) + ask_blkid(device.path)


def find_users(path: str, *, sysfs: Path = SYSFS, proc: Path = PROC) -> list[str]:
    """Return the users of a device and its partitions: mounts, swap, and devices built on them."""
    try:
        is_device = stat.S_ISBLK(os.stat(path).st_mode)
        return users_of(device_number(path), sysfs=sysfs, proc=proc) if is_device else []
    except OSError:
        return []  # opening the device will raise


def users_of(number: str, *, sysfs: Path, proc: Path) -> list[str]:
    """Return the same as `find_users`, for a device number such as "259:0"."""
    folder = (sysfs / "dev/block" / number).resolve()
    folders = [folder, *sorted(path.parent for path in folder.glob("*/partition"))]
    numbers = {read_line(part / "dev"): part.name for part in folders}
    numbers[number] = folder.name
    names = {part.name for part in folders}
    users = []
    for mount in read_mounts(proc):
        # Some file systems (btrfs) have a device number of their own, but give their source.
        name = numbers.get(mount.number) or device_name(mount.source)
        if name in names:
            users.append(f"{name} is mounted on {mount.point}")
    for line in read_lines(proc / "swaps")[1:]:
        name = device_name(unescaped(line.split()[0]))
        if name in names:
            users.append(f"{name} is used as swap")
    for part in folders:
        holders = sorted(path.name for path in (part / "holders").glob("*"))
        if holders:
            users.append(f"{part.name} is part of {', '.join(holders)}")
    return users


def refusal(path: str, code: int, cause: str, fix: str) -> StoreError:
    """Return the error for a device that is left untouched."""
    error = StoreError(code, f"cannot use {path} as a raw volume: {cause}\nfix: {fix}")
    error.volume = path
    return error


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[Device]:
    try:
        # Checked first: opening another kind of device, such as a tape, may change it.
        if not stat.S_ISBLK(os.stat(path, follow_symlinks=False).st_mode):
            raise _no_device(path)
        descriptor = os.open(path, flags)
    except StoreError:
        raise
    except OSError as error:
        raise _not_opened(path, error) from error
    # A forked child would keep the claim and the lock for as long as it lives.
    private = _core.PrivateDescriptor(descriptor)
    try:
        if not stat.S_ISBLK(os.fstat(descriptor).st_mode):
            raise _no_device(path)
        yield Device(path, descriptor, os.lseek(descriptor, 0, os.SEEK_END))
    finally:
        private.close()


def _failed(path: str, verb: str, error: OSError) -> StoreError:
    cause = f"it cannot be {verb}: {error.strerror}"
    return refusal(path, error.errno or errno.EIO, cause, "look at dmesg; name another device")


def _no_device(path: str) -> StoreError:
    cause = "it is not a block device"
    return refusal(path, errno.ENOTBLK, cause, "leave raw out for a directory; lsblk lists devices")


def _not_opened(path: str, error: OSError) -> StoreError:
    if error.errno == errno.EBUSY:
        return _busy(path, "by a mount, RAID, LVM, or another run of memascend")
    code = error.errno or errno.EIO
    if code in (errno.EACCES, errno.EPERM):
        fix = f"give this user the right to read and write it: setfacl -m u:$USER:rw {path}"
    else:
        fix = "name a block device that is there; lsblk lists them"
    return refusal(path, code, f"it cannot be opened: {error.strerror}", fix)


def _busy(path: str, users: str) -> StoreError:
    fix = "stop or unmount its users, or name another device; lsblk shows both"
    return refusal(path, errno.EBUSY, f"it is in use ({users})", fix)


def _how_to_format(path: str, found: list[str]) -> str:
    if found:
        return (
            f"look at it with lsblk --fs {path}; if nothing on it is needed: wipefs --all {path}; "
            f"then memascend volume format {path}"
        )
    return f"memascend volume format {path} (destroys what is on it)"
