"""Environments in which releases of DeepSpeed take turns; pip and Python are not run."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.scripts import load_script

SOURCES = "lib/python3.11/site-packages/deepspeed/ops/csrc"
COMPILED_S = 1_600_000_000  # when operators were compiled, from sources a minute older


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("environments")


def write(folder: Path, contents: dict[str, str], time_s: int) -> None:
    """Write sources as an archive has them, with times of its own."""
    for name, text in contents.items():
        path = folder / SOURCES / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, (time_s, time_s))


def test_operators_are_compiled_again_where_a_release_changes_their_sources(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = script.Environment(tmp_path)
    write(tmp_path, {"adam/a.cpp": "one", "adam/b.cpp": "one"}, COMPILED_S - 60)
    ran: list[Any] = []

    def install(*words: str) -> None:
        ran.append(words[-1])
        # A changed file may be older than the operator, and one that stayed may be newer.
        write(tmp_path, {"adam/a.cpp": "two", "adam/c.cpp": "new"}, COMPILED_S - 90)
        write(tmp_path, {"adam/b.cpp": "one"}, COMPILED_S + 60)

    monkeypatch.setattr(environment, "install", install)
    monkeypatch.setattr(environment, "python", lambda *words: ran.append(words))
    environment.exchange_deepspeed("0.19.0")
    assert ran == ["deepspeed==0.19.0", ("-c", script.COMPILE, *script.TRAINING, script.DRIVES)]
    is_newer = {
        path.name: path.stat().st_mtime > COMPILED_S for path in (tmp_path / SOURCES).rglob("*.cpp")
    }
    assert is_newer == {"a.cpp": True, "b.cpp": False, "c.cpp": True}
