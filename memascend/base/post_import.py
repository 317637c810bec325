"""Runs an action on a foreign module after its import, without importing it.

Standard library only: torch itself may be half imported when this is used.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence

Action = Callable[[types.ModuleType], None]


def after_import(name: str, action: Action) -> None:
    """Call `action` with a module: at once if it is imported, else after its import.

    A second call for a module that is not imported yet has no effect.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        action(module)
    elif not _finders(name):
        sys.meta_path.insert(0, _PostImportFinder(name, action))


def forget_import(name: str) -> None:
    """Undo `after_import` for a module that is not imported yet."""
    for finder in _finders(name):
        sys.meta_path.remove(finder)


def _finders(name: str) -> list[_PostImportFinder]:
    return [one for one in sys.meta_path if isinstance(one, _PostImportFinder) and one.name == name]


class _PostImportFinder(importlib.abc.MetaPathFinder):
    """A finder that delegates to the others, and runs the action after the module's execution."""

    def __init__(self, name: str, action: Action) -> None:
        self.name = name
        self._action = action
        self._searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is None or spec.loader is None:
            return None
        spec.loader = _ObservingLoader(spec.loader, self._action)
        return spec


class _ObservingLoader(importlib.abc.Loader):
    """A loader that delegates to the real one, then runs the action."""

    def __init__(self, loader: importlib.abc.Loader, action: Action) -> None:
        self._loader = loader
        self._action = action

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        self._action(module)

    def __getattr__(self, name: str) -> object:
        # get_source, get_code, is_package, ...: inspect and linecache use them.
        return getattr(self._loader, name)
