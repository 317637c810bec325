"""The environment: our switches, the launcher's numbers, the user's cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memascend.config import block, environment


@pytest.mark.parametrize(("value", "disabled"), [("1", True), ("true", True), ("0", False)])
def test_the_environment_can_disable(
    monkeypatch: pytest.MonkeyPatch, value: str, disabled: bool
) -> None:
    monkeypatch.setenv(environment.DISABLE_VARIABLE, value)
    assert environment.is_disabled() is disabled
    assert (block.active_config({"memascend": {}}) is None) is disabled


def test_a_block_of_blanks_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.CONFIG_VARIABLE, " ")
    assert environment.block_text() == ""


def test_measurements_are_kept_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert str(environment.cache_directory()) == "/cache/memascend"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(environment.cache_directory()) == "/home/somebody/.cache/memascend"


@pytest.mark.parametrize(("text", "rank"), [("3", 3), ("-1", 0), ("", 0)])
def test_the_launcher_states_which_rank_of_the_machine_this_is(
    monkeypatch: pytest.MonkeyPatch, text: str, rank: int
) -> None:
    monkeypatch.setenv("LOCAL_RANK", text)
    assert environment.local_rank() == rank


def test_the_launcher_states_how_many_ranks_the_machine_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert environment.local_world_size() == 1
    monkeypatch.setenv("LOCAL_SIZE", "2")
    assert environment.local_world_size() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert environment.local_world_size() == 4


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, []),
        ({"MALLOC_ARENA_MAX": "1", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}, []),
        ({"MALLOC_TRIM_THRESHOLD_": "", "MALLOC_MMAP_MAX_": "9"}, ["MALLOC_MMAP_MAX_"]),
        (
            {
                "MALLOC_MMAP_THRESHOLD_": "65536",
                "GLIBC_TUNABLES": "glibc.rtld.nns=4:glibc.malloc.hugetlb=1",
            },
            ["MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES (glibc.malloc.hugetlb)"],
        ),
    ],
)
def test_what_the_user_told_malloc_to_give_back_is_named(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], found: list[str]
) -> None:
    for name in [*os.environ]:
        if name.startswith(("MALLOC_", "GLIBC_")):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert environment.malloc_settings() == found


@pytest.mark.parametrize(("text", "folder"), [("", None), (" ", None), ("/traces", "/traces")])
def test_traces_go_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, text: str, folder: str | None
) -> None:
    monkeypatch.setenv(environment.TRACE_VARIABLE, text)
    assert environment.trace_folder() == (None if folder is None else Path(folder))
    monkeypatch.delenv(environment.TRACE_VARIABLE)
    assert environment.trace_folder() is None
