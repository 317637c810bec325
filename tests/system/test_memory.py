"""Memory as the kernel counts it: what this process can have, and what it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from memascend.base.units import GIB, KIB, MIB
from memascend.errors import ConfigError
from memascend.system.memory import group_limit, memory_available, memory_total, resident_memory

UNLIMITED_V1 = 9223372036854771712


def machine(root: Path, *, total: int = 64 * GIB, free: int = 32 * GIB) -> None:
    write(
        root / "proc/meminfo", f"MemTotal: {total // KIB} kB\nMemAvailable: {free // KIB} kB\nX: y"
    )


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_without_groups_it_is_what_the_machine_has_free(tmp_path: Path) -> None:
    machine(tmp_path)
    assert memory_available(tmp_path) == 32 * GIB


def test_an_old_kernel_without_available_memory_gives_all(tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", "MemTotal: 1024 kB")
    assert memory_available(tmp_path) == 1024 * KIB


@pytest.mark.parametrize("level", ["sys/fs/cgroup/a/b/c", "sys/fs/cgroup/a/b", "sys/fs/cgroup/a"])
def test_every_group_above_counts(tmp_path: Path, level: str) -> None:
    machine(tmp_path)
    write(tmp_path / "proc/self/cgroup", "0::/a/b/c")
    for folder in ("a/b/c", "a/b", "a"):
        write(tmp_path / "sys/fs/cgroup" / folder / "memory.max", "max")
    write(tmp_path / level / "memory.max", 5 * GIB)
    assert memory_available(tmp_path) == 5 * GIB


def test_a_container_that_sees_the_hosts_path_gets_the_limit_at_the_mount(tmp_path: Path) -> None:
    machine(tmp_path)
    write(tmp_path / "proc/self/cgroup", "0::/system.slice/docker-1.scope")
    write(tmp_path / "sys/fs/cgroup/memory.max", 3 * GIB)
    assert memory_available(tmp_path) == 3 * GIB


def test_a_path_that_leads_out_of_the_namespace_stays_below_the_mount(tmp_path: Path) -> None:
    machine(tmp_path)
    write(tmp_path / "proc/self/cgroup", "0::/../../other")
    write(tmp_path / "sys/fs/cgroup/memory.max", 3 * GIB)
    write(tmp_path / "sys/memory.max", 1)
    assert memory_available(tmp_path) == 3 * GIB


def test_version_1_counts_and_its_unlimited_value_binds_nothing(tmp_path: Path) -> None:
    machine(tmp_path)
    write(tmp_path / "proc/self/cgroup", "4:cpu,memory:/a/b\n3:cpuset:/a\n0::/")
    memory = tmp_path / "sys/fs/cgroup/memory"
    write(memory / "a/b/memory.limit_in_bytes", UNLIMITED_V1)
    assert memory_available(tmp_path) == 32 * GIB
    write(memory / "a/memory.limit_in_bytes", 7 * GIB)
    assert memory_available(tmp_path) == 7 * GIB


def test_nothing_to_read_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="host_memory_limit"):
        memory_available(tmp_path)


def test_this_machine_has_some() -> None:
    assert 0 < memory_available() < 1 << 60


def test_what_there_is_does_not_depend_on_what_is_free(tmp_path: Path) -> None:
    """A fraction of it means the same on every day."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 4096 kB\nMemAvailable: 1024 kB\n")
    assert memory_total(tmp_path) == 4096 * 1024
    assert memory_available(tmp_path) == 1024 * 1024
    with pytest.raises(ConfigError):
        memory_total(tmp_path / "nothing")


def test_the_tightest_group_is_found_and_without_groups_there_is_none(tmp_path: Path) -> None:
    assert group_limit(tmp_path) is None
    write(tmp_path / "proc/self/cgroup", "0::/a/b")
    write(tmp_path / "sys/fs/cgroup/a/b/memory.max", 5 * GIB)
    write(tmp_path / "sys/fs/cgroup/a/memory.max", 3 * GIB)
    assert group_limit(tmp_path) == 3 * GIB


def write_status(root: Path, text: str) -> None:
    write(root / "self/status", text)


def test_resident_memory_is_what_the_kernel_says(tmp_path: Path) -> None:
    write_status(tmp_path, "Name:\tpython\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\nThreads:\t3\n")
    assert resident_memory(tmp_path) == (1 * MIB, 2 * MIB)


def test_a_kernel_without_the_peak_gives_what_is_now(tmp_path: Path) -> None:
    # As in some sandboxes.
    write_status(tmp_path, "VmRSS:\t    1024 kB\n")
    assert resident_memory(tmp_path) == (1 * MIB, 1 * MIB)


def test_a_kernel_that_says_nothing_gives_zeros(tmp_path: Path) -> None:
    assert resident_memory(tmp_path) == (0, 0)


def test_this_process_has_some_resident_memory() -> None:
    now, most = resident_memory()
    assert 0 < now <= most
