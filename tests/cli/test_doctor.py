"""`memascend doctor`: what it says of this machine, of bad places, and of what machines lack."""

from __future__ import annotations

import ctypes
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from memascend import _core
from memascend.base.units import GIB, MIB
from memascend.cli import doctor
from memascend.cli.doctor import Check
from memascend.cli.main import main
from memascend.ledger.drives import NO_SMARTCTL, USED_PERCENT_HIGH, DriveReport, DriveWear
from memascend.system.heap import Heap
from memascend.system.mounts import filesystem_of

CHECKS = ["system", "torch", "deepspeed", "transformers", "frameworks", "activation", "io_uring"]
CHECKS += ["page lock", "huge pages", "host memory", "heap", "compiler", "libaio", "device"]


def diagnose(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, dict[str, str]]]:
    status = main(["doctor", "--json", "--path", str(path)])
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"] == (status == 0)
    return status, {check["name"]: check for check in report["checks"]}


# -- this machine ----------------------------------------------------------------------------------


def test_doctor_looks_at_everything_and_ends_with_a_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, checks = diagnose(tmp_path, capsys)
    assert list(checks) == [*CHECKS, "disk", "wear", "speed", "direct I/O", "trial"]
    assert checks["trial"]["state"] == "ok"
    assert "1.00 MiB written, read and compared by" in checks["trial"]["found"]
    assert all(check["fix"] for check in checks.values() if check["state"] != "ok")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_does_not_exist_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, checks = diagnose(tmp_path / "missing", capsys)
    assert (status, checks["path"]["state"]) == (1, "problem")
    assert "trial" not in checks


def test_memory_is_not_accepted_as_a_disk(capsys: pytest.CaptureFixture[str]) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or filesystem_of(memory) != "tmpfs":
        pytest.skip("/dev/shm is not a tmpfs here")
    status, checks = diagnose(memory, capsys)
    assert status == 1
    assert checks["disk"]["state"] == "problem"


def test_larger_pages_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.mmap, "PAGESIZE", 65536)
    check = doctor._system()
    assert (check.state, "65536" in check.found) == ("problem", True)


@pytest.mark.parametrize(("state", "status"), [("ok", 0), ("note", 0), ("problem", 1)])
def test_the_table_has_every_finding_as_it_is_and_only_problems_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: str, status: int
) -> None:
    checks = [Check("first", "ok", "[red] found"), Check("last", state, "values", "[do] this")]
    monkeypatch.setattr(doctor, "examine", lambda path: checks)
    assert main(["doctor"]) == status
    printed = capsys.readouterr().out
    for part in ("first", "[red] found", "last", state, "values", "-> [do] this"):
        assert part in printed
    verdict = "1 problem(s) in the way" if status else "ready"
    assert printed.splitlines()[-1].startswith(f"{verdict}; ")


@pytest.mark.parametrize(
    ("heap", "settings", "state", "fix"),
    [
        (Heap("glibc 2.36"), [], "ok", ""),
        (Heap("glibc 2.36", "set"), ["MALLOC_MMAP_MAX_"], "note", "unset MALLOC_MMAP_MAX_"),
        (Heap("libjemalloc.so.2", "other"), ["MALLOC_MMAP_MAX_"], "note", "LD_PRELOAD"),
    ],
)
def test_the_heap_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, heap: Heap, settings: list[str], state: str, fix: str
) -> None:
    monkeypatch.setattr(doctor, "malloc_settings", lambda: settings)
    monkeypatch.setattr(doctor, "examine_heap", lambda settings: heap)
    check = doctor._heap()
    assert (check.name, check.state) == ("heap", state)
    assert heap.allocator in check.found
    assert fix in check.fix


# -- the trial -------------------------------------------------------------------------------------


def test_a_file_system_that_copies_what_is_overwritten_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CopiesOnWrite(_core.Store):
        def volume_stats(self) -> list[SimpleNamespace]:
            return [SimpleNamespace(copies_on_write=True)]

    monkeypatch.setattr(_core, "Store", CopiesOnWrite)
    check = doctor._trial(tmp_path)
    assert check.state == "note"
    assert "chattr" in check.fix


def test_what_is_read_back_is_really_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LosesReads(_core.Store):
        def read(self, *, key: str, address: int, nbytes: int, **_: object) -> _core.Ticket:
            return self.write(key="elsewhere", address=address, nbytes=nbytes)

    monkeypatch.setattr(_core, "Store", LosesReads)
    check = doctor._trial(tmp_path)
    assert check.state == "problem"
    assert "differs" in check.found
    assert check.fix


def test_an_engine_that_fails_is_named(tmp_path: Path) -> None:
    check = doctor._trial(tmp_path / "missing")
    assert check.state == "problem"
    assert str(tmp_path / "missing") in check.found
    assert check.fix


def test_a_core_that_was_not_built_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import memascend

    monkeypatch.delattr(memascend, "_core")
    monkeypatch.setitem(doctor.sys.modules, "memascend._core", None)
    check = doctor._trial(tmp_path)
    assert check.state == "problem"
    assert "make environment" in check.fix


# -- software --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hooks", "environment", "state", "named"),
    [
        (["hook"], {}, "ok", ""),
        ([], {}, "problem", "pip install"),
        (["hook"], {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "problem", "import memascend"),
        (["hook"], {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}, "ok", ""),
        (["hook"], {"MEMASCEND_DISABLE": "yes"}, "note", "unset"),
        (["hook"], {"MEMASCEND_DISABLE": "no"}, "ok", ""),
    ],
)
def test_what_keeps_memascend_from_being_loaded_is_found(
    monkeypatch: pytest.MonkeyPatch,
    hooks: list[str],
    environment: dict[str, str],
    state: str,
    named: str,
) -> None:
    for name in ("TORCH_DEVICE_BACKEND_AUTOLOAD", "MEMASCEND_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda **_: hooks)
    check = doctor._activation()
    assert check.state == state
    assert named in check.fix
    if state != "ok":
        assert all(f"{name}={value}" in check.found for name, value in environment.items())


# -- the kernel ------------------------------------------------------------------------------------


def test_a_refused_io_uring_is_a_note_that_names_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Refusing:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def syscall(self, *_: object) -> int:
            ctypes.set_errno(1)
            return -1

    monkeypatch.setattr(doctor.ctypes, "CDLL", Refusing)
    check = doctor._io_uring()
    assert check.state == "note"
    assert "Operation not permitted" in check.found
    assert check.fix


@pytest.mark.parametrize(
    ("limit", "capable", "state"),
    [
        (resource.RLIM_INFINITY, False, "ok"),
        (8 * MIB, True, "ok"),
        (8 * MIB, False, "note"),
        (0, False, "note"),
    ],
)
def test_a_limit_of_locked_memory_counts_where_nothing_lifts_it(
    monkeypatch: pytest.MonkeyPatch, limit: int, capable: bool, state: str
) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(doctor, "_has_ipc_lock", lambda: capable)
    check = doctor._page_lock_limit()
    assert check.state == state
    assert ("memlock" in check.fix) == (state == "note")


@pytest.mark.parametrize(
    ("status", "capable"),
    [
        ("Name:\tx\nCapEff:\t0000000000004000\n", True),  # bit 14
        ("CapEff:\t000001ffffffbfff\n", False),
        ("Name:\tx\n", False),
        (None, False),
    ],
)
def test_the_capability_to_lock_is_read_from_the_kernel(
    files: Callable[[dict[str, str]], None], status: str | None, capable: bool
) -> None:
    files({} if status is None else {"/proc/self/status": status})
    assert doctor._has_ipc_lock() is capable


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Gives doctor a machine that has these files and no others."""

    def give(contents: dict[str, str]) -> None:
        for name, text in contents.items():
            path = tmp_path / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr(doctor, "PROC", tmp_path / "proc")
        monkeypatch.setattr(doctor, "SYSFS", tmp_path / "sys")

    return give


@pytest.mark.parametrize(
    ("setting", "free", "state"),
    [
        ("always [madvise] never", 0, "ok"),
        ("always madvise [never]", 0, "note"),
        ("always madvise [never]", 12, "ok"),
        (None, 0, "note"),
    ],
)
def test_huge_pages_of_either_kind_do(
    files: Callable[[dict[str, str]], None], setting: str | None, free: int, state: str
) -> None:
    machine = {"/proc/meminfo": f"MemTotal: 8 kB\nHugePages_Free:     {free}\n"}
    if setting is not None:
        machine["/sys/kernel/mm/transparent_hugepage/enabled"] = setting
    files(machine)
    check = doctor._huge_pages()
    assert check.state == state
    assert f"free: {free}" in check.found
    assert ("madvise" in check.fix) == (state == "note")


@pytest.mark.parametrize(
    ("limit", "found"),
    [(None, "4.00 GiB, no lower"), (8 * GIB, "4.00 GiB, no lower"), (GIB, "1.00 GiB by cgroup")],
)
def test_the_tighter_of_machine_and_group_is_told(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, found: str
) -> None:
    facts = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 4 * GIB // 4096}
    monkeypatch.setattr(doctor.os, "sysconf", facts.__getitem__)
    monkeypatch.setattr(doctor, "group_limit", lambda: limit)
    assert doctor._memory_limit().found.startswith(found)


# -- the drive -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "kind", "state"),
    [(100 * GIB, "ext4", "ok"), (GIB, "xfs", "note"), (100 * GIB, "tmpfs", "problem")],
)
def test_a_drive_needs_room_and_must_not_be_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, kind: str, state: str
) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    monkeypatch.setattr(doctor, "filesystem_of", lambda path: kind)
    check = doctor._free_space(tmp_path)
    assert check.state == state
    assert kind in check.found
    assert str(tmp_path) in check.found


def test_a_file_system_with_more_room_than_a_file_may_have_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=100 * GIB))
    monkeypatch.setattr(doctor, "_largest_file", lambda path: 16 * GIB)
    check = doctor._free_space(tmp_path)
    assert (check.state, "16.00 GiB" in check.found) == ("note", True)
    assert "several directories" in check.fix


def test_a_folder_that_cannot_be_written_bounds_no_file(tmp_path: Path) -> None:
    assert 0 < doctor._largest_file(tmp_path) <= 1 << 64
    assert doctor._largest_file(tmp_path / "missing") > 1 << 60


WORN = DriveWear("nvme0n1", used_percent=USED_PERCENT_HIGH)


@pytest.mark.parametrize(
    ("reading", "state", "fix"),
    [
        (DriveReport((DriveWear("nvme0n1", used_percent=3),)), "ok", ""),
        (DriveReport((WORN,)), "note", "new drive"),
        (DriveReport((WORN,), {"sda": NO_SMARTCTL}), "note", "new drive"),
        (DriveReport(silent={"sda": NO_SMARTCTL}), "note", "smartmontools"),
        (DriveReport(silent={"sda": "Permission denied"}), "note", "as root"),
    ],
)
def test_worn_and_silent_drives_are_notes_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reading: DriveReport, state: str, fix: str
) -> None:
    monkeypatch.setattr(doctor, "read_drives", lambda paths: reading)
    check = doctor._wear(tmp_path)
    assert check.state == state
    assert fix in check.fix
    assert all(drive.name in check.found for drive in reading.drives)
    assert all(reason in check.found for reason in reading.silent.values())


def test_a_folder_without_direct_io_is_a_problem_and_left_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument", path)
        return plain_open(path, flags, *rest)

    plain_open = os.open
    monkeypatch.setattr(doctor.os, "open", refuse)
    check = doctor._direct_io(tmp_path)
    assert check.state == "problem"
    assert "Invalid argument" in check.found
    assert check.fix
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("least", [512, 2048, 4096])
def test_the_smallest_transfer_that_the_drive_takes_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    def write(descriptor: int, part: memoryview, offset: int) -> int:
        if len(part) < least:
            raise OSError(22, "Invalid argument")
        return len(part)

    monkeypatch.setattr(doctor.os, "pwrite", write)
    assert f"{least} bytes" in doctor._direct_io(tmp_path).found
