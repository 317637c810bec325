"""What is recognised on a device, by magic numbers alone and by really made file systems."""

from __future__ import annotations

import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memascend.volumes import signatures as volume_signatures
from memascend.volumes.header import new_header
from memascend.volumes.signatures import ask_blkid, find_signatures

SIZE = 64 << 20
SBIN = "/usr/sbin:/sbin:/usr/bin:/bin"


def signatures_of(parts: dict[int, bytes], size: int = SIZE) -> list[str]:
    device = bytearray(size)
    for offset, content in parts.items():
        start = offset if offset >= 0 else size + offset
        device[start : start + len(content)] = content
    return find_signatures(lambda offset, nbytes: bytes(device[offset : offset + nbytes]), size)


def test_an_empty_device_and_our_own_have_none():
    assert signatures_of({}) == []
    assert signatures_of({0: new_header(device_bytes=SIZE, owner_uid=0).pack()}) == []


@pytest.mark.parametrize(
    ("offset", "content", "name"),
    [
        (510, b"\x55\xaa", "MBR"),
        (512, b"EFI PART", "GPT"),
        (4096, b"EFI PART", "GPT"),
        (-512, b"EFI PART", "GPT"),
        (1080, b"\x53\xef", "ext4"),
        (0, b"XFSB", "xfs"),
        (65600, b"_BHRfS_M", "btrfs"),
        (512, b"LABELONE", "LVM2"),
        (4086, b"SWAPSPACE2", "swap"),
        (0, b"LUKS\xba\xbe", "LUKS"),
        (3, b"NTFS    ", "NTFS"),
        (82, b"FAT32   ", "FAT"),
        (4096, b"\xfc\x4e\x2b\xa9", "md RAID"),
        (-65536, b"\xfc\x4e\x2b\xa9", "md RAID"),
        (-8192, b"\xfc\x4e\x2b\xa9", "md RAID"),
        ((128 << 10) + 1024, b"\x0c\xb1\xba\x00\x00\x00\x00\x00", "ZFS"),
    ],
)
def test_each_magic_is_found_in_its_place(offset, content, name):
    [found] = signatures_of({offset: content})
    assert name in found


@given(st.integers(0, 70_000), st.binary(max_size=4096))
def test_no_device_is_too_short_or_strange(size, content):
    device = content[:size]
    find_signatures(lambda offset, nbytes: device[offset : offset + nbytes], size)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("mkfs.ext4 -q -F {}", "ext4"),
        ("mkfs.xfs -q -f {}", "xfs"),
        ("mkfs.btrfs -q -f {}", "btrfs"),
        ("mkfs.vfat {}", "FAT"),
        ("mkswap {}", "swap"),
        ("sfdisk -q --label gpt {}", "GPT"),
        ("sfdisk -q --label dos {}", "MBR"),
    ],
)
def test_what_the_real_tools_make_is_found(tmp_path, command, name):
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(400 << 20)
    words = [word.replace("{}", str(image)) for word in command.split()]
    program = shutil.which(words[0], path=SBIN)
    if program is None:
        pytest.skip(f"{words[0]} is not installed")
    done = subprocess.run([program, *words[1:]], input="", capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"{words[0]} cannot make one here: {done.stderr.strip()[:200]}")
    with image.open("rb") as file:

        def read(offset: int, nbytes: int) -> bytes:
            file.seek(offset)
            return file.read(nbytes)

        assert any(name in found for found in find_signatures(read, 400 << 20))


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("echo TYPE=ext4; echo PTTYPE=gpt", ["ext4 (blkid)", "a gpt partition table (blkid)"]),
        ("exit 2", []),
        ("exit 8", ["several signatures at once (blkid is in doubt)"]),
        ("printf 'TYPE=\\033[31mred\\303'", ["[31mred? (blkid)"]),
    ],
)
def test_blkid_is_asked_and_not_trusted(tmp_path: Path, monkeypatch, body, found):
    program = tmp_path / "blkid"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(volume_signatures, "_BLKID_PATH", f"{tmp_path}:/bin:/usr/bin")
    assert ask_blkid("/dev/null") == found


def test_without_blkid_our_own_list_decides(monkeypatch):
    monkeypatch.setattr(volume_signatures, "_BLKID_PATH", "/nowhere")
    assert ask_blkid("/dev/null") == []
