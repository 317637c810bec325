"""Signatures on a block device: partition tables, file systems, LVM, RAID, swap, encryption.

A device is left untouched if either finds a signature: the magic numbers below, or `blkid`, which
knows many more, if it is installed.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

Read = Callable[[int, int], bytes]  # offset, bytes -> content, shorter at the device's end

_BLKID_SECONDS = 30
_BLKID_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_ZFS_UBERBLOCKS = range(128 << 10, 256 << 10, 1 << 10)


@dataclass(frozen=True, slots=True)
class _Magic:
    name: str
    offset: int  # negative: from the device's end
    content: bytes


_MAGICS = (
    _Magic("an MBR partition table or boot sector", 510, b"\x55\xaa"),
    _Magic("a GPT partition table", 512, b"EFI PART"),
    _Magic("a GPT partition table", 4096, b"EFI PART"),
    _Magic("a GPT partition table (the copy at the end)", -512, b"EFI PART"),
    _Magic("a GPT partition table (the copy at the end)", -4096, b"EFI PART"),
    _Magic("an ext2, ext3 or ext4 file system", 1024 + 56, b"\x53\xef"),
    _Magic("an xfs file system", 0, b"XFSB"),
    _Magic("a btrfs file system", (64 << 10) + 64, b"_BHRfS_M"),
    _Magic("an f2fs file system", 1024, b"\x10\x20\xf5\xf2"),
    _Magic("an NTFS file system", 3, b"NTFS    "),
    _Magic("an exFAT file system", 3, b"EXFAT   "),
    _Magic("a FAT file system", 54, b"FAT12   "),
    _Magic("a FAT file system", 54, b"FAT16   "),
    _Magic("a FAT file system", 82, b"FAT32   "),
    *(_Magic("an LVM2 physical volume", offset, b"LABELONE") for offset in (0, 512, 1024, 1536)),
    *(
        _Magic("swap space", page - 10, content)
        for page in (4 << 10, 8 << 10, 16 << 10, 64 << 10)
        for content in (b"SWAPSPACE2", b"SWAP-SPACE")
    ),
    _Magic("a LUKS encrypted volume", 0, b"LUKS\xba\xbe"),
    *(
        _Magic("a LUKS encrypted volume (second header)", offset << 10, b"SKUL\xba\xbe")
        for offset in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    ),
    _Magic("a member of an md RAID", 0, b"\xfc\x4e\x2b\xa9"),
    _Magic("a member of an md RAID", 4096, b"\xfc\x4e\x2b\xa9"),
    _Magic("a bcache device", 4096 + 24, bytes.fromhex("c68573f64e1a45ca8265f57f48ba6d81")),
)


def find_signatures(read: Read, device_bytes: int) -> list[str]:
    """Return the names of the signatures found, each once; empty for a device without data."""
    found = []
    for magic in (*_MAGICS, *_raid_at_the_end(device_bytes)):
        offset = magic.offset if magic.offset >= 0 else device_bytes + magic.offset
        if offset >= 0 and read(offset, len(magic.content)) == magic.content:
            found.append(magic.name)
    for label in (0, 256 << 10):
        blocks = (read(label + offset, 8) for offset in _ZFS_UBERBLOCKS)
        magics = (struct.pack("<Q", 0x00BAB10C), struct.pack(">Q", 0x00BAB10C))
        if any(block in magics for block in blocks):
            found.append("a member of a ZFS pool")
    return list(dict.fromkeys(found))


def ask_blkid(path: str) -> list[str]:
    """Return the signatures that blkid finds; empty if it is not installed or may not read."""
    program = shutil.which("blkid", path=_BLKID_PATH)
    if program is None:
        return []
    try:
        done = subprocess.run(
            [program, "-p", "-o", "export", "--", path],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_BLKID_SECONDS,
            env={"LC_ALL": "C", "PATH": _BLKID_PATH},
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode == 8:
        return ["several signatures at once (blkid is in doubt)"]
    values = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    kinds = (("TYPE", "{} (blkid)"), ("PTTYPE", "a {} partition table (blkid)"))
    return [text.format(_plain(values[name])) for name, text in kinds if values.get(name)]


def _plain(text: str) -> str:
    """Replace characters that are not ASCII, and drop those that a terminal cannot print."""
    return "".join(letter if letter.isascii() else "?" for letter in text if letter.isprintable())


def _raid_at_the_end(device_bytes: int) -> list[_Magic]:
    """Return the places of the superblock of md versions 0.90 and 1.0."""
    magic = b"\xfc\x4e\x2b\xa9"
    sectors = device_bytes // 512
    places = {((sectors - 16) & ~7) * 512, (device_bytes & ~0xFFFF) - (64 << 10)}
    return [_Magic("a member of an md RAID", place, magic) for place in places if place > 0]
