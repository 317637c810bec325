"""The limit: what may be written, and what the kernel's files say this process can have."""

from __future__ import annotations

from pathlib import Path

import pytest

from memascend.base.units import GIB, KIB
from memascend.config.limit import default_limit, memory_available, memory_total, parse_limit
from memascend.errors import ConfigError

UNLIMITED_V1 = 9223372036854771712


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("6GiB", 6 * GIB),
        ("1.5 GB", 1_500_000_000),
        ("4096", 4096),
        (12345, 12345),
        (0.5, 4 * GIB),
        (1.0, 8 * GIB),
        (1, 8 * GIB),
        (1e-12, 1),
    ],
)
def test_a_limit_is_bytes_text_or_a_fraction(value: object, expected: int | None) -> None:
    assert parse_limit(value, available=8 * GIB) == expected


@pytest.mark.parametrize(
    "value",
    [0, -1, -0.5, 1.5, 0.0, float("nan"), float("inf"), True, False, "", "six", "6 apples", "-6GiB",
     "0.5", "0GiB", "50%", [], {}, b"6GiB"],
)  # fmt: skip
def test_anything_else_is_refused_with_key_value_and_what_is_allowed(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_limit(value, available=8 * GIB)
    for part in ("memascend.host_memory_limit", repr(value), "6GiB", "fraction"):
        assert part in str(caught.value)


def test_the_default_is_the_plan_but_at_most_half_of_what_is_free() -> None:
    assert default_limit(3 * GIB, available=100 * GIB) == 3 * GIB
    assert default_limit(3 * GIB, available=4 * GIB) == 2 * GIB


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
