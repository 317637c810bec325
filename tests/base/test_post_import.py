"""A module of others is acted on once it is imported; tests/test_autoload.py has the rest."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from memascend.base.post_import import after_import, forget_import

NAME = "imported_late"


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{NAME}.py").write_text("VALUE = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, NAME, raising=False)


def test_the_action_follows_the_import_once() -> None:
    seen: list[ModuleType] = []
    for _ in range(2):
        after_import(NAME, seen.append)
    assert seen == []
    imported = importlib.import_module(NAME)
    assert seen == [imported]
    assert imported.VALUE == 1


def test_of_a_module_that_is_there_it_follows_at_once() -> None:
    imported = importlib.import_module(NAME)
    seen: list[ModuleType] = []
    after_import(NAME, seen.append)
    assert seen == [imported]


def test_two_modules_are_waited_for_apart_and_one_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / "another_late.py").write_text("")
    seen: list[str] = []
    for name in (NAME, "another_late"):
        after_import(name, lambda module: seen.append(module.__name__))
    forget_import(NAME)
    for name in (NAME, "another_late"):
        importlib.import_module(name)
        del sys.modules[name]
    assert seen == ["another_late"]
