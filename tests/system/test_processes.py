"""The sampler sees what a process tree really holds and moves."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from memascend.base.units import MIB
from memascend.system import processes
from memascend.system.processes import (
    IoCounter,
    Sample,
    TreeSampler,
    disk_bytes,
    drive_counters,
    nameless_disk_bytes,
    process_tree,
)

SAMPLE_COUNT = 5
HOLD = """
import ctypes, mmap, sys, time
block = mmap.mmap(-1, {nbytes})
block.write(b"x" * {nbytes})
{extra}
print("ready", flush=True)
sys.stdin.read()
"""


def holding_process(nbytes: int, extra: str = "") -> subprocess.Popen[bytes]:
    program = HOLD.format(nbytes=nbytes, extra=extra)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def sampled(process: subprocess.Popen[bytes]) -> TreeSampler:
    sampler = TreeSampler(process.pid, interval_s=0.02)
    sampler.start()
    while len(sampler.samples) < SAMPLE_COUNT:
        time.sleep(0.01)
    sampler.stop()
    process.communicate()
    return sampler


def test_resident_memory_grows_by_what_is_allocated() -> None:
    small, large = sampled(holding_process(MIB)), sampled(holding_process(65 * MIB))
    growth = large.samples[-1].total_rss_bytes - small.samples[-1].total_rss_bytes
    assert abs(growth - 64 * MIB) < 4 * MIB
    assert abs(large.peaks.pss_bytes - small.peaks.pss_bytes - 64 * MIB) < 4 * MIB


def test_the_peak_of_a_process_includes_what_it_has_given_back() -> None:
    gave_back = "extra = bytearray(b'x') * (64 << 20); del extra"
    sampler = sampled(holding_process(MIB, gave_back))
    assert max(sampler.peaks.process_rss_bytes.values()) > 64 * MIB
    assert sampler.samples[-1].total_rss_bytes < 64 * MIB


def test_locked_memory_is_seen() -> None:
    lock = (
        "address = ctypes.addressof(ctypes.c_char.from_buffer(block));"
        "assert ctypes.CDLL(None).mlock(ctypes.c_void_p(address), ctypes.c_size_t(4096)) == 0"
    )
    sampler = sampled(holding_process(MIB, lock))
    assert sampler.samples[-1].locked_bytes == 4096


def test_descendants_are_part_of_the_tree() -> None:
    waits = "'import sys; sys.stdin.read()'"
    child = f"import subprocess; subprocess.Popen([sys.executable, '-c', {waits}])"
    process = holding_process(MIB, child)
    assert len(process_tree(process.pid)) == 2
    process.communicate()


def test_the_tree_of_a_process_that_is_gone_is_empty() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert process_tree(process.pid) == []


def test_memory_above_a_baseline_is_counted_process_by_process() -> None:
    sample = Sample(0.0, {1: 100, 2: 350, 3: 99}, locked_bytes=0, registered_bytes=0)
    assert sample.above(100) == 250
    assert sample.above(0) == sample.total_rss_bytes == 549


def test_bytes_written_by_a_grandchild_are_counted_once(tmp_path: Path) -> None:
    if not os.access("/proc/self/io", os.R_OK):
        pytest.skip("the kernel keeps no I/O account (/proc/self/io)")
    write = (
        "import os; f = os.open('out', os.O_WRONLY | os.O_CREAT);"
        f"os.write(f, b'x' * {8 * MIB}); os.fsync(f)"
    )
    parent = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {write!r}])"
    counter = IoCounter()
    subprocess.run([sys.executable, "-c", parent], cwd=tmp_path, check=True)
    moved = counter.read_and_written_bytes()
    assert moved is not None
    if moved[1] == 0:
        pytest.skip("no storage behind the temporary folder (tmpfs)")
    assert 8 * MIB <= moved[1] < 9 * MIB


def test_files_from_before_the_run_are_not_its_disk_use(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"x" * MIB)
    time.sleep(0.05)
    started = time.time()
    time.sleep(0.05)
    folder = tmp_path / "deep" / "deeper"
    folder.mkdir(parents=True)
    (folder / "new").write_bytes(b"x" * 2 * MIB)
    assert disk_bytes(tmp_path, since=started) == 2 * MIB
    assert disk_bytes(tmp_path / "missing", since=started) == 0


def test_open_files_without_a_name_are_disk_use_once(tmp_path: Path) -> None:
    with tempfile.TemporaryFile(dir=tmp_path) as file, tempfile.TemporaryFile() as elsewhere:
        for open_file in (file, elsewhere):
            open_file.write(b"x" * MIB)
            open_file.flush()
            os.fsync(open_file.fileno())
        again = os.dup(file.fileno())
        assert nameless_disk_bytes([os.getpid()], [tmp_path]) == MIB
        os.close(again)
    assert nameless_disk_bytes([os.getpid()], [tmp_path]) == 0


def test_drives_are_sampled_from_the_start_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = iter({"sda": SimpleNamespace(read_bytes=moved)} for moved in range(10**9))
    monkeypatch.setattr(processes, "DRIVE_INTERVAL_S", 0.0)
    monkeypatch.setattr(processes, "drives_of", lambda folders: ["sda", "gone"][: 2 * len(folders)])
    monkeypatch.setattr(psutil, "disk_io_counters", lambda *, perdisk, nowrap: next(counters))
    for folders, is_watched in (([tmp_path], True), ([], False)):
        process = holding_process(MIB)
        sampler = TreeSampler(process.pid, interval_s=0.001, folders=folders)
        sampler.start()
        while len(sampler.samples) < 3:
            time.sleep(0.001)
        process.communicate()
        sampler.stop()
        found = sampler.drive_samples
        assert (len(found) > 2) == is_watched
        assert [each.time_s for each in found] == sorted(each.time_s for each in found)
        assert all(set(each.counters) == {"sda"} for each in found)
        moved = [each.counters["sda"].read_bytes for each in found]
        assert moved == sorted(moved)


def test_counters_have_the_names_of_sysfs_and_the_fields_that_are_drawn() -> None:
    counted = psutil.disk_io_counters(perdisk=True, nowrap=False)
    names = {name.replace("/", "!") for name in counted}
    found = drive_counters([*names, "gone"])
    assert found.keys() == names
    assert all(each.read_bytes >= 0 and each.write_bytes >= 0 for each in found.values())


@pytest.mark.parametrize("error", [PermissionError, ValueError, NotImplementedError])
def test_drives_that_cannot_be_counted_are_none(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**asked: bool) -> None:
        raise error("no counters here")

    monkeypatch.setattr(psutil, "disk_io_counters", fail)
    assert drive_counters(["sda"]) == {}


def test_drives_are_found_below_folders_that_a_run_makes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def below(path: Path) -> list[str]:
        asked.append(path)
        return ["sdb", "sda"]

    monkeypatch.setattr(processes, "drives_below", below)
    assert processes.drives_of([tmp_path / "not" / "yet", tmp_path]) == ["sda", "sdb"]
    assert asked == [tmp_path, tmp_path]
