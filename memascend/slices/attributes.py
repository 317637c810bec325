"""Finds tensors that a layer has as attributes, in lists and dictionaries too.

One that a call keeps, as a loss that the model adds to its own, would be that of one slice and
without a graph. One that is put into a layer before its call is not cut, and its graph would be
differentiated once for each slice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memascend.slices.cut import CannotCut

#: Attributes of every module: parameters, hooks and the like.
_OF_MODULES = frozenset(vars(nn.Module()))
#: Types of most attributes, which have no tensors.
_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})
#: Tensors are looked for in lists of lists of so many levels.
_DEPTH_MAX = 4


class _Value:
    """The tensors in a value but for parameters, and the items of its lists and dictionaries."""

    def __init__(self, value: Any) -> None:
        self.tensors: list[torch.Tensor] = []
        self.contents: list[tuple[Any, Any]] = []
        self._add(value, 0)

    def _add(self, value: Any, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            if not isinstance(value, nn.Parameter):
                self.tensors.append(value)
        elif isinstance(value, list | tuple | dict | deque):
            items = dict(value) if isinstance(value, dict) else list(value)
            self.contents.append((value, items))
            if depth < _DEPTH_MAX:
                for one in items.values() if isinstance(items, dict) else items:
                    if type(one) not in _PLAIN:
                        self._add(one, depth + 1)

    @property
    def length(self) -> int:
        """That of a list; 0 of another value."""
        return len(self.contents[0][1]) if self.contents and self.is_list else 0

    @property
    def is_list(self) -> bool:
        """Whether the value is a list, to which a call may append."""
        return bool(self.contents) and isinstance(self.contents[0][0], list | deque)

    def restore(self) -> None:
        """Give all lists and dictionaries their items."""
        for value, items in self.contents:
            if isinstance(value, dict):
                value.clear()
                value.update(items)
            elif not isinstance(value, tuple):
                value.clear()
                value.extend(items)


@dataclass
class _Attributes:
    """The attributes, or the buffers, of one module before a call.

    Tensors are referred to, so that no other one gets the identity of one of them.
    """

    path: str
    now: dict[str, Any]
    are_buffers: bool
    before: dict[str, Any]
    values: dict[str, _Value]

    @classmethod
    def of(cls, path: str, now: dict[str, Any], *, are_buffers: bool = False) -> _Attributes:
        """Note what the dictionary `now` has."""
        values = {name: _Value(one) for name, one in now.items() if _may_have_tensors(name, one)}
        return cls(path, now, are_buffers, dict(now), values)

    def kept(self) -> Iterator[str]:
        """Yield the names of attributes that have other tensors now, or a list of other length."""
        for name, one in self.now.items():
            if not _may_have_tensors(name, one):
                continue
            if one is self.before.get(name) and isinstance(one, torch.Tensor):
                continue
            if self._is_kept(self.values.get(name, _Value(None)), _Value(one)):
                yield name

    def _is_kept(self, old: _Value, new: _Value) -> bool:
        known = set(map(id, old.tensors))
        others = [one for one in new.tensors if id(one) not in known]
        if self.are_buffers:  # counters of calls and tokens may be other tensors
            return any(map(torch.is_floating_point, others))
        return bool(others) or (new.is_list and new.length != old.length)

    def restore(self) -> None:
        """Give attributes that the call has kept their value from before."""
        for name in tuple(self.kept()):
            if name in self.before:
                self.now[name] = self.before[name]
            else:
                del self.now[name]
            if name in self.values:
                self.values[name].restore()


def _may_have_tensors(name: str, value: Any) -> bool:
    return type(value) not in _PLAIN and name not in _OF_MODULES


class Attributes:
    """The attributes of a module and those in it, before a call."""

    def __init__(self, module: nn.Module, *, without: nn.Module | None = None) -> None:
        """Note them; not those of one module and those in that."""
        self._all: list[_Attributes] = []
        others = set() if without is None else set(without.modules())
        for path, one in module.named_modules(memo=others):
            prefix = f"{path}." if path else ""
            self._all.append(_Attributes.of(prefix, vars(one)))
            if one._buffers:
                self._all.append(_Attributes.of(prefix, one._buffers, are_buffers=True))

    def _tensors(self, *, buffers: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for one in self._all:
            if buffers or not one.are_buffers:
                for name, value in one.values.items():
                    for tensor in value.tensors:
                        yield one.path + name, tensor

    def check_graphs(self) -> None:
        """Raise CannotCut if one is computed from others: each slice would differentiate that."""
        for name, tensor in self._tensors(buffers=True):
            if tensor.grad_fn is not None:
                raise CannotCut(f"its attribute {name} has a graph of gradients")

    def check_rows(self, sequences: int) -> None:
        """Raise CannotCut if one is as long as the batch: every slice would have all of it."""
        for name, tensor in self._tensors(buffers=False):
            if sequences > 1 and tensor.shape[:1] == (sequences,):
                shape = tuple(tensor.shape)
                raise CannotCut(f"its attribute {name} of shape {shape} may be of all sequences")

    def check_kept(self) -> None:
        """Raise CannotCut if the call has kept a tensor, or changed the length of a list."""
        for one in self._all:
            for name in one.kept():
                raise CannotCut(f"its attribute {one.path}{name} keeps a value of the call")

    def restore(self) -> None:
        """Undo that: values of the whole batch come in the place of those of slices."""
        for one in self._all:
            one.restore()
