"""Entries of modules and files that have other values for a while, and get theirs back.

Ctrl-C that comes twice may end that, too: the next pass begins with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Replaced:
    """What has another value now."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._undo: list[Callable[[], object]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a module or a file until `restore`, past `nn.Module.__setattr__`."""
        self._undo.append(_undo(vars(owner), name))
        vars(owner)[name] = value

    @contextmanager
    def having(self, names: dict[str, Any], name: str, value: Any) -> Iterator[None]:
        """Within the context a dictionary has another value."""
        undo = _undo(names, name)
        self._undo.append(undo)
        try:
            names[name] = value
            yield
        finally:
            undo()
            self._undo.remove(undo)

    def restore(self) -> None:
        """Give all their values back, the last first."""
        while self._undo:
            self._undo[-1]()
            self._undo.pop()


def _undo(names: dict[str, Any], name: str) -> Callable[[], object]:
    """Return what gives a name its value of now, or removes it."""
    if name in names:
        return functools.partial(names.__setitem__, name, names[name])
    return functools.partial(names.pop, name, None)
