"""Faults that the kernel makes: file systems that shut down, devices that go, groups that throttle.

What tests/nvme/test_store_faults.py does with seeds, with the real thing.
`make test-root` runs these.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from memascend import _core
from memascend.config.block import parse_block
from memascend.errors import StoreError, StoreFullError
from memascend.nvme.store import TensorStore
from memascend.volumes.device import claimed, format_device
from memascend.volumes.prepare import prepared
from tests.support.loop_devices import (
    control_group,
    frozen,
    loop_device,
    make_read_only,
    map_to_error,
    mapped_device,
    mounted,
    run,
    shut_down,
    tool,
)
from tests.support.nvme_memory import BOUNCE_BYTES, PageMemory, open_store, read, write
from tests.support.seccomp import DENY_DIRECT
from tests.support.store_programs import start

pytestmark = pytest.mark.root

MEBIBYTE = 1 << 20
CONTENT = bytes(range(256)) * (4 * MEBIBYTE // 256)
ENGINES = ["auto", "threads"]


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A device, and a folder on which its file system is mounted."""
    images = tmp_path / "images"
    images.mkdir()
    with (
        loop_device(images) as device,
        mounted(device, tmp_path / "drive", "errors=remount-ro") as folder,
    ):
        yield device, folder


@contextlib.contextmanager
def opened(folder: Path, engine: str, **options: object) -> Iterator[_core.Store]:
    store = open_store(folder, engine, eio_pause_seconds=0.01, **options)
    try:
        yield store
    finally:
        store.close()


def fill(folder: Path) -> None:
    """Take all the space that a file system has left."""
    with (folder / "others").open("wb") as file:
        size, step = 0, 64 * MEBIBYTE
        while step >= 4096:
            try:
                os.posix_fallocate(file.fileno(), size, step)
                size += step
            except OSError:
                step //= 2


def failure(action: object) -> StoreError:
    """What an action raises; also that it says what to do, and does not take long."""
    began = time.monotonic()
    with pytest.raises(StoreError) as caught:
        action()  # type: ignore[operator]
    assert "\nlikely cause: " in str(caught.value)
    assert "\nfix: " in str(caught.value)
    assert time.monotonic() - began < 10
    return caught.value


@pytest.mark.parametrize("engine", ENGINES)
def test_a_file_system_that_journals_data_is_used_buffered(tmp_path: Path, engine: str) -> None:
    """It accepts O_DIRECT and goes through the page cache all the same."""
    images = tmp_path / "images"
    images.mkdir()
    with (
        loop_device(images) as device,
        mounted(device, tmp_path / "drive", "data=journal") as folder,
        opened(folder, engine) as store,
    ):
        assert not store.direct
        write(store, "k", CONTENT).wait()
        assert read(store, "k", len(CONTENT)) == CONTENT


@pytest.mark.parametrize("kind", ["btrfs", "xfs"])
def test_on_a_file_system_that_became_full_what_was_reserved_is_overwritten(
    tmp_path: Path, kind: str
) -> None:
    """btrfs copies what is overwritten, unless it is asked not to while the file is empty."""
    images = tmp_path / "images"
    images.mkdir()
    options = ["compress-force=zstd"] if kind == "btrfs" else []
    with (
        loop_device(images, nbytes=512 * MEBIBYTE) as device,
        mounted(device, tmp_path / "drive", *options, kind=kind) as folder,
        opened(folder, "auto", grow_bytes=64 * MEBIBYTE) as store,
    ):
        assert store.direct
        assert not store.volume_stats()[0].copies_on_write
        content = os.urandom(64 * MEBIBYTE)
        write(store, "k", content).wait()
        fill(folder)
        for turn in range(4):
            content = content[turn + 1 :] + content[: turn + 1]
            write(store, "k", content).wait()
        assert read(store, "k", len(content)) == content


@pytest.mark.parametrize("engine", ENGINES)
def test_a_drive_that_is_pulled_out_is_named(drive: tuple[str, Path], engine: str) -> None:
    _, folder = drive
    with opened(folder, engine) as store:
        write(store, "k", CONTENT).wait()
        shut_down(folder)
        error = failure(lambda: read(store, "k", len(CONTENT)))
        assert (error.errno, error.volume, error.key) == (errno.EIO, str(folder), "k")
        assert "the drive failed or was pulled out" in str(error)
        assert store.stats()["eio_retries"] >= 2
        error = failure(lambda: write(store, "k", CONTENT).wait())
        assert "what the key held is lost" in str(error)
        error = failure(lambda: store.reserve(key="new", nbytes=32 * MEBIBYTE))
        assert error.volume == str(folder)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_drive_that_is_pulled_out_under_load_ends_every_transfer(
    drive: tuple[str, Path], engine: str
) -> None:
    _, folder = drive
    with opened(folder, engine) as store:
        write(store, "k", CONTENT).wait()
        memory = PageMemory(len(CONTENT))
        tickets = []
        for turn in range(16):
            if turn == 8:
                shut_down(folder)
            tickets.append(write(store, f"k{turn % 4}", CONTENT) if turn % 2 else None)
            tickets.append(
                store.read(key="k", address=memory.address, nbytes=len(CONTENT), hold=memory)
            )
            if turn >= 9:
                break
        store.wait_all()
        assert all(ticket is None or ticket.done() for ticket in tickets)
        assert store.stats()["in_flight_count"] == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_file_system_that_becomes_read_only_is_said_to_be(
    drive: tuple[str, Path], engine: str
) -> None:
    device, folder = drive
    with opened(folder, engine) as store:
        write(store, "k", CONTENT).wait()
        make_read_only(device)
        error = failure(lambda: write(store, "k", CONTENT).wait())
        assert (error.errno, error.volume) == (errno.EROFS, str(folder))
        assert "the file system is read-only" in str(error)
        assert store.stats()["eio_retries"] == 0  # no use
        error = failure(lambda: store.reserve(key="new", nbytes=32 * MEBIBYTE))
        assert error.errno == errno.EROFS


def test_a_file_system_that_is_read_only_is_not_begun_with(drive: tuple[str, Path]) -> None:
    _, folder = drive
    run("mount", "-o", "remount,ro", str(folder))
    config = parse_block({"volumes": [str(folder)]})

    def through_block() -> None:
        with prepared(config, "unused"):
            pass

    def directly() -> None:
        TensorStore(volumes=[folder], bounce=PageMemory(BOUNCE_BYTES).tensor)

    for begin in (through_block, directly):
        error = failure(begin)
        assert error.errno == errno.EROFS
        assert "mount it read-write again" in str(error)


def test_a_drive_that_is_full_below_its_file_system_is_an_error(tmp_path: Path) -> None:
    """As a thin volume whose pool is full: the file system has promised what is not there."""
    with (
        mounted("tmpfs", tmp_path / "pool", "size=24m") as pool,
        loop_device(pool) as device,
        mounted(device, tmp_path / "drive") as folder,
        opened(folder, "threads", grow_bytes=64 * MEBIBYTE) as store,
    ):
        store.reserve(key="k", nbytes=64 * MEBIBYTE)
        write(store, "k", CONTENT, offset=0).wait()
        error = failure(lambda: write(store, "k", bytes(60 * MEBIBYTE), offset=0).wait())
        assert error.errno in (errno.ENOSPC, errno.EIO)
        assert error.volume == str(folder)


def test_a_write_that_the_page_cache_took_and_lost_is_told(tmp_path: Path) -> None:
    """Without direct I/O the error comes when the pages are written back."""
    with (
        mounted("tmpfs", tmp_path / "pool", "size=24m") as pool,
        loop_device(pool) as device,
        mounted(device, tmp_path / "drive") as folder,
    ):
        script = """
        store = open_store(directory, "threads", grow_bytes=64 << 20)
        print(store.direct)
        try:
            write(store, "k", b"x" * (60 << 20)).wait()
        except StoreError as error:
            print("told")
        """
        process = start(folder, DENY_DIRECT + script.replace("\n        ", "\n"))
        output, errors = process.communicate(timeout=60)
        assert output == "False\ntold\n", errors


def until_blocked(thread: threading.Thread) -> None:
    """Wait until a thread is inside a system call that no signal ends."""
    stat = Path(f"/proc/self/task/{thread.native_id}/stat")
    end = time.monotonic() + 30
    while stat.read_text().rpartition(") ")[2][0] != "D":
        assert time.monotonic() < end, "the file system did not block it"
        time.sleep(0.001)


@pytest.mark.parametrize("engine", ENGINES)
def test_transfers_go_on_while_the_file_system_takes_long_over_new_space(
    drive: tuple[str, Path], engine: str
) -> None:
    _, folder = drive
    with opened(folder, engine, grow_bytes=MEBIBYTE) as store:
        write(store, "k", CONTENT).wait()
        grower = threading.Thread(target=lambda: store.reserve(key="new", nbytes=len(CONTENT)))
        results: queue.Queue[tuple[bytes, dict[str, float]]] = queue.Queue()
        worker = threading.Thread(
            target=lambda: results.put((read(store, "k", len(CONTENT)), store.stats())), daemon=True
        )
        with frozen(folder):
            grower.start()
            until_blocked(grower)
            worker.start()
            found, counters = results.get(timeout=30)
            is_growing = grower.is_alive()
        grower.join()
        assert (found == CONTENT, is_growing) == (True, True)
        assert counters["bytes_written"] >= len(CONTENT)
        assert store.nbytes(key="new") == len(CONTENT)


def test_the_largest_file_of_a_file_system_is_the_room_of_a_volume(tmp_path: Path) -> None:
    """A small stand-in for ext4 on a drive of more than 16 TiB: without extents it is 16 GiB."""
    images = tmp_path / "images"
    images.mkdir()
    make = ("-b", "1024", "-N", "16", "-O", "^extent,^64bit,^has_journal,^resize_inode")
    with (
        loop_device(images, nbytes=20 << 30) as device,
        mounted(device, tmp_path / "drive", make=make) as folder,
        opened(folder, "auto") as store,
    ):
        available_bytes = store.available_bytes()
        state = os.statvfs(folder)
        assert 16 << 30 <= available_bytes < state.f_bavail * state.f_frsize - (1 << 30)
        store.reserve(key="all", nbytes=available_bytes)  # takes no space without extents
        with pytest.raises(StoreFullError, match="available 0 bytes") as caught:
            store.reserve(key="more", nbytes=1)
        assert "a file of this file system has at most" in str(caught.value)
        assert "second directory" in str(caught.value)


def test_two_jobs_on_one_full_drive_do_not_take_from_each_other(drive: tuple[str, Path]) -> None:
    _, folder = drive
    with opened(folder, "auto") as one, opened(folder, "auto") as other:
        write(one, "k", CONTENT).wait()
        write(other, "k", CONTENT[::-1]).wait()
        one.reserve(key="more", nbytes=32 * MEBIBYTE)
        with pytest.raises(StoreFullError, match="fix: free space there"):
            other.reserve(key="more", nbytes=96 * MEBIBYTE)
        assert read(other, "k", len(CONTENT)) == CONTENT[::-1]
        assert read(one, "k", len(CONTENT)) == CONTENT


@contextlib.contextmanager
def raw_store(device: str) -> Iterator[TensorStore]:
    with claimed(device) as claim:
        format_device(claim, owner_uid=os.geteuid())
    config = parse_block({"volumes": [{"path": device, "raw": True, "weight": 1}]})
    with prepared(config, "unused") as volumes:
        store = TensorStore(volumes=volumes, bounce=PageMemory(BOUNCE_BYTES).tensor, eio_retries=1)
    try:
        yield store
    finally:
        store.close()


def test_a_loop_device_detached_in_use_stays_until_the_run_is_over(tmp_path: Path) -> None:
    with loop_device(tmp_path) as device:
        with raw_store(device) as store:
            run("losetup", "--detach", device)
            write(store.core, "k", CONTENT).wait()
            assert read(store.core, "k", len(CONTENT)) == CONTENT
        listed = subprocess.run([tool("losetup"), device], capture_output=True, text=True)
        assert listed.returncode != 0  # gone with its last user


def test_a_device_that_loses_its_end_is_an_error(tmp_path: Path) -> None:
    with loop_device(tmp_path) as device, raw_store(device) as store:
        (image,) = tmp_path.glob("*.image")
        write(store.core, "k", CONTENT).wait()
        os.truncate(image, 2 * MEBIBYTE)
        run("losetup", "--set-capacity", device)
        error = failure(lambda: write(store.core, "k", CONTENT).wait())
        assert error.volume == device


def test_a_mapped_device_that_begins_to_fail_is_named(tmp_path: Path) -> None:
    with (
        loop_device(tmp_path) as below,
        mapped_device(below, f"memascend-test-{os.getpid()}") as device,
        raw_store(device) as store,
    ):
        write(store.core, "k", CONTENT).wait()
        map_to_error(device)
        error = failure(lambda: read(store.core, "k", len(CONTENT)))
        assert error.errno == errno.EIO
        assert error.volume == os.path.realpath(device)
        assert store.stats()["eio_retries"] > 0


SLOW = """
import time
other = Path(sys.argv[2])
store = open_store(directory, "threads", volumes=[str(directory), str(other)], pace_seconds=1.0,
                   stripe_bytes=128 << 10, queue_depth=8)
store.reserve(key="k", nbytes=32 << 20)
end = time.monotonic() + 20
count = 0
while not store.stats()["slow_spells"] and time.monotonic() < end:
    write(store, "k", bytes(1 << 20), offset=0).wait()
    count += 1
print(store.stats()["slow_spells"], count > 1, store.stats()["stalls"])
store.close()
"""


def test_a_drive_a_hundred_times_slower_is_named_and_waited_for(tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    with contextlib.ExitStack() as made:
        devices = [made.enter_context(loop_device(images)) for _ in range(2)]
        fast, slow = (
            made.enter_context(mounted(device, tmp_path / name))
            for device, name in zip(devices, ("fast", "slow"), strict=True)
        )
        group = made.enter_context(control_group("blkio"))
        number = os.stat(devices[1]).st_rdev
        limit = f"{os.major(number)}:{os.minor(number)} {2 * MEBIBYTE}"
        try:
            (group / "blkio.throttle.write_bps_device").write_text(limit)
        except OSError as error:
            pytest.skip(f"this kernel does not throttle: {error}")
        join = f"Path({str(group / 'cgroup.procs')!r}).write_text(str(os.getpid()))\n"
        process = start(fast, join + SLOW, str(slow))
        output, errors = process.communicate(timeout=60)
        assert output == "1 True 0\n", errors
        assert errors.count(f"{slow} is far slower than the other volumes") == 1
        assert "MB/s" in errors


PRESSED = """
content = os.urandom(1 << 20)
store = open_store(directory, ENGINE, grow_bytes=1 << 20)
for turn in range(100):
    write(store, f"k{turn}", content).wait()
for turn in range(100):
    assert read(store, f"k{turn}", 1 << 20) == content
print("whole", store.direct)
store.close()
"""


@pytest.mark.parametrize("head", ["", DENY_DIRECT], ids=["direct", "buffered"])
def test_a_group_with_less_memory_than_the_store_moves_is_enough(
    drive: tuple[str, Path], head: str
) -> None:
    _, folder = drive
    with control_group("memory") as group:
        (group / "memory.limit_in_bytes").write_text(str(48 * MEBIBYTE))
        join = f"Path({str(group / 'cgroup.procs')!r}).write_text(str(os.getpid()))\n"
        process = start(folder, join + head + PRESSED.replace("ENGINE", "'threads'"))
        output, errors = process.communicate(timeout=120)
        assert output == f"whole {not head}\n", errors
        assert int((group / "memory.max_usage_in_bytes").read_text()) <= 48 * MEBIBYTE
