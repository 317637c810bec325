"""Raw block devices: what is left alone and why, what is claimed, formatted and wiped."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memascend.config.block import MemAscendConfig, parse_block
from memascend.errors import ConfigError, StoreError, StoreFullError
from memascend.nvme.store import TensorStore
from memascend.volumes.device import (
    claimed,
    find_users,
    format_device,
    formatted,
    looked_at,
    users_of,
    wipe_device,
)
from memascend.volumes.header import START_BYTES
from memascend.volumes.prepare import prepared
from tests.support.loop_devices import DEVICE_BYTES, loop_device, run
from tests.support.nvme_memory import BOUNCE_BYTES, PageMemory

pytestmark = pytest.mark.root


@pytest.fixture
def device(tmp_path: Path) -> Iterator[str]:
    with loop_device(tmp_path) as path:
        yield path


@pytest.fixture
def raw(device: str) -> str:
    """A formatted device."""
    with claimed(device) as opened:
        format_device(opened, owner_uid=os.geteuid())
    return device


def block(*paths: str, **more: object) -> MemAscendConfig:
    return parse_block(
        {
            "volumes": [{"path": path, "raw": True, "weight": 1, **more} for path in paths],
            "direct_nvme": {"engine": "threads"},
        }
    )


def refusal(path: str) -> str:
    """Why a device cannot be used; also that it says what to do."""
    with pytest.raises(StoreError) as caught, formatted(path):
        pass
    assert "\nfix: " in str(caught.value)
    assert caught.value.volume == os.path.realpath(path)
    return str(caught.value)


def content(path: str, offset: int, nbytes: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(nbytes)


def put(path: str, offset: int, text: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(text)


def test_a_formatted_device_is_taken_and_block_0_never_written(raw):
    before = content(raw, 0, START_BYTES)
    with prepared(block(raw), "unused") as volumes:
        store = TensorStore(
            volumes=volumes, bounce=PageMemory(BOUNCE_BYTES).tensor, engine="threads"
        )
    nbytes = DEVICE_BYTES - START_BYTES
    assert store.core.available_bytes() == nbytes
    source = torch.randint(256, (nbytes,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    store.write(key="all", source=source).wait()
    store.read(key="all", target=target).wait()
    assert torch.equal(source, target)
    with pytest.raises(StoreFullError, match="available 0 bytes"):
        store.reserve(key="more", nbytes=1)
    store.close()
    assert content(raw, 0, START_BYTES) == before


def test_a_capacity_limits_what_is_used(raw):
    with prepared(block(raw, capacity="32MiB"), "unused") as volumes:
        store = TensorStore(
            volumes=volumes, bounce=PageMemory(BOUNCE_BYTES).tensor, engine="threads"
        )
    assert store.core.available_bytes() == 32 << 20
    store.close()


def test_what_was_used_is_discarded_in_the_end(raw):
    with prepared(block(raw), "unused") as volumes:
        store = TensorStore(
            volumes=volumes, bounce=PageMemory(BOUNCE_BYTES).tensor, engine="threads"
        )
    store.write(key="k", source=torch.full((1 << 20,), 7, dtype=torch.uint8)).wait()
    store.close()
    with looked_at(raw) as opened:
        assert opened.read(START_BYTES, 1 << 20) == bytes(1 << 20)


def test_directories_and_devices_share_the_tensors(raw, tmp_path):
    config = parse_block(
        {
            "volumes": [
                {"path": raw, "raw": True, "weight": 1},
                {"path": str(tmp_path / "folder"), "weight": 1},
            ],
            "direct_nvme": {"engine": "threads"},
        }
    )
    with prepared(config, "unused") as volumes:
        store = TensorStore(
            volumes=volumes, bounce=PageMemory(BOUNCE_BYTES).tensor, engine="threads"
        )
    source = torch.randint(256, (9 << 20,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    store.write(key="k", source=source).wait()
    store.read(key="k", target=target).wait()
    assert torch.equal(source, target)
    assert sorted(volume.used_bytes for volume in store.core.volume_stats()) == [4 << 20, 5 << 20]
    store.close()


def test_a_device_is_measured_like_a_directory(raw, tmp_path):
    config = parse_block(
        {
            "volumes": [{"path": raw, "raw": True}, str(tmp_path / "folder")],
            "direct_nvme": {"engine": "threads", "queue_depth": 4},
        }
    )
    with prepared(config, "unused", cache=tmp_path / "cache") as volumes:
        assert min(volume.weight for volume in volumes) == 1.0
        assert volumes[0].descriptor >= 0
    assert (tmp_path / "cache").is_dir()
    with formatted(raw):
        pass


def test_a_device_in_use_waits_for_its_requests(raw):
    """Devices that are mapped to others answer EAGAIN to a descriptor that must not wait."""
    with prepared(block(raw), "unused") as volumes:
        descriptor = volumes[0].descriptor
        store = TensorStore(volumes=volumes, bounce=PageMemory(BOUNCE_BYTES).tensor)
        assert not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_NONBLOCK
        assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        store.close()


def test_a_child_that_outlives_a_run_leaves_its_device_free(raw):
    here, there = socket.socketpair()
    with formatted(raw):
        child = os.fork()
        if child == 0:
            there.send(b".")  # it has let the device go by now
            os._exit(0 if there.recv(1) else 1)
    here.recv(1)
    try:
        with formatted(raw):
            pass
    finally:
        here.send(b".")
        assert os.waitpid(child, 0)[1] == 0


def test_a_store_keeps_its_device_to_itself(raw):
    with prepared(block(raw), "unused") as volumes:
        store = TensorStore(
            volumes=volumes, bounce=PageMemory(BOUNCE_BYTES).tensor, engine="threads"
        )
    assert "it is in use" in refusal(raw)
    code = f"from memascend.volumes.device import claimed\nwith claimed({raw!r}): pass"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "it is in use" in other.stderr
    store.close()
    with formatted(raw):
        pass


def _hold(path: str, ready: multiprocessing.synchronize.Event) -> None:
    with formatted(path):
        ready.set()
        multiprocessing.Event().wait()


def test_a_killed_run_leaves_the_device_free(raw):
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    holder = context.Process(target=_hold, args=(raw, ready))
    holder.start()
    assert ready.wait(60)
    assert "it is in use" in refusal(raw)
    holder.kill()
    holder.join()
    with formatted(raw):
        pass


def test_another_programs_lock_is_respected(raw, monkeypatch):
    import fcntl

    monkeypatch.setattr("memascend.volumes.device._LOCK_SECONDS", 0.1)
    with open(raw, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another process has locked it" in refusal(raw)


def test_a_device_without_a_header_is_left_alone(device):
    text = refusal(device)
    assert "it has no header of memascend" in text
    assert f"fix: memascend volume format {device}" in text


@pytest.mark.parametrize(
    ("offset", "magic", "name"),
    [(510, b"\x55\xaa", "MBR"), (512, b"EFI PART", "GPT"), (1080, b"\x53\xef", "ext4"),
     (0, b"LUKS\xba\xbe", "LUKS"), (512, b"LABELONE", "LVM2")],
)  # fmt: skip
def test_a_device_with_a_signature_is_left_alone(device, offset, magic, name):
    put(device, offset, magic)
    text = refusal(device)
    assert name in text
    assert "wipefs --all" in text
    with claimed(device) as opened, pytest.raises(StoreError, match=name):
        format_device(opened, owner_uid=0)
    assert content(device, offset, len(magic)) == magic


def test_a_real_file_system_is_left_alone(device):
    run("mkfs.ext4", "-q", "-F", device)
    before = zlib.crc32(content(device, 0, 4 << 20))
    assert "ext4" in refusal(device)
    with claimed(device) as opened, pytest.raises(StoreError, match="ext4"):
        format_device(opened, owner_uid=0)
    with claimed(device) as opened, pytest.raises(StoreError, match="no header"):
        wipe_device(opened)
    assert zlib.crc32(content(device, 0, 4 << 20)) == before


def test_a_mounted_device_is_left_alone(device, tmp_path):
    run("mkfs.ext4", "-q", "-F", device)
    place = tmp_path / "a place"
    place.mkdir()
    run("mount", device, str(place))
    try:
        assert f"is mounted on {place}" in refusal(device)
        assert find_users(device) == [f"{os.path.basename(device)} is mounted on {place}"]
    finally:
        subprocess.run(["umount", str(place)], check=True)
    assert find_users(device) == []


def test_swap_is_left_alone(device):
    run("mkswap", device)
    run("swapon", device)
    try:
        assert "is used as swap" in refusal(device)
    finally:
        subprocess.run(["swapoff", device], check=True)


def test_a_damaged_header_is_left_alone(raw):
    put(raw, 100, b"x")
    assert "checksum" in refusal(raw)
    for action in (wipe_device, lambda opened: format_device(opened, owner_uid=0)):
        with claimed(raw) as opened, pytest.raises(StoreError, match="checksum"):
            action(opened)


def test_another_users_device_is_left_alone(raw, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert "and this is 12345" in refusal(raw)


def test_a_read_only_device_is_left_alone(tmp_path):
    with loop_device(tmp_path, read_only=True) as path:
        assert re.search("read-only|Read-only", refusal(path))


def test_a_small_device_is_left_alone(tmp_path):
    with loop_device(tmp_path, nbytes=8 << 20) as path:
        assert "8.00 MiB, less than 64.00 MiB" in refusal(path)


def test_a_device_smaller_than_what_is_wanted_is_left_alone(raw):
    with (
        pytest.raises(StoreError, match="less than the 1073741824 wanted"),
        prepared(block(raw, capacity="1GiB"), "unused"),
    ):
        pass


def test_wiping_leaves_nothing(raw):
    put(raw, START_BYTES, b"secret")
    with claimed(raw) as opened:
        assert wipe_device(opened)
    assert content(raw, 0, 2 * START_BYTES) == bytes(2 * START_BYTES)
    with looked_at(raw) as opened:
        assert opened.header() is None


def test_formatting_again_makes_another_volume(raw):
    with formatted(raw) as (_, first):
        pass
    with claimed(raw) as opened:
        second = format_device(opened, owner_uid=os.geteuid())
    assert first.uuid != second.uuid
    with formatted(raw) as (_, found):
        assert found == second


def test_one_device_under_two_names_is_refused(raw, tmp_path):
    (tmp_path / "link").symlink_to(raw)
    with (
        pytest.raises(ConfigError, match="are the same"),
        prepared(block(raw, str(tmp_path / "link")), "unused"),
    ):
        pass


def test_a_device_needs_raw(raw):
    config = parse_block({"volumes": [raw]})
    with pytest.raises(StoreError, match='"raw": true') as caught, prepared(config, "unused"):
        pass
    assert "it is a block device" in str(caught.value)


@pytest.mark.parametrize("path", ["/dev/null", "/etc/passwd", "/", "/dev/no such device"])
def test_what_is_no_block_device_is_left_alone(path):
    assert re.search("not a block device|No such file", refusal(path))


def test_users_are_found_by_number_partitions_included(tmp_path):
    sysfs, proc = tmp_path / "sys", tmp_path / "proc"
    disk = sysfs / "devices/pci/nvme0n1"
    for part, number in (("", "259:0"), ("nvme0n1p1", "259:1"), ("nvme0n1p2", "259:2")):
        (disk / part / "holders").mkdir(parents=True)
        (disk / part / "dev").write_text(f"{number}\n")
        if part:
            (disk / part / "partition").write_text("1\n")
    (disk / "nvme0n1p2/holders/dm-0").mkdir()
    (sysfs / "dev/block").mkdir(parents=True)
    (sysfs / "dev/block/259:0").symlink_to(disk)
    (proc / "self").mkdir(parents=True)
    (proc / "self/mountinfo").write_text(
        "22 1 254:0 / / rw - ext4 /dev/vda rw\n"
        "30 22 259:1 / /mnt/with\\040blank rw,relatime shared:1 - ext4 /dev/nvme0n1p1 rw\n"
        "31 22 0:45 / /mnt/pool rw - btrfs /dev/nvme0n1p2 rw\n"
        "32 22 0:46 / /proc rw - proc proc rw\n"
        "damaged\n"
    )
    (proc / "swaps").write_text(
        "Filename Type Size Used Priority\n/dev/nvme0n1p1 partition 1 0 -2\n"
    )
    assert users_of("259:0", sysfs=sysfs, proc=proc) == [
        "nvme0n1p1 is mounted on /mnt/with blank",
        "nvme0n1p2 is mounted on /mnt/pool",
        "nvme0n1p1 is used as swap",
        "nvme0n1p2 is part of dm-0",
    ]
    assert users_of("8:0", sysfs=sysfs, proc=proc) == []


def test_a_device_that_fails_is_a_clear_error(device, monkeypatch):
    def broken(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", broken)
    assert "it cannot be read: Input/output error" in refusal(device)
    monkeypatch.undo()
    monkeypatch.setattr(os, "pwrite", broken)
    with claimed(device) as opened, pytest.raises(StoreError, match="cannot be written"):
        format_device(opened, owner_uid=0)


def test_an_error_names_the_device_and_a_code(device):
    with pytest.raises(StoreError) as caught, formatted(device):
        pass
    assert caught.value.errno == errno.EINVAL
