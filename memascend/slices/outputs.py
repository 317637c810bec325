"""Outputs of a model that compute their logits when they are read, at the places of stock ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

_LOGITS = "logits"
#: The attribute of an output that computes its logits.
_READ = "_read_logits"


def with_logits_on_demand(
    output_type: type, fields: Mapping[str, Any], read: Callable[[], Any]
) -> Any:
    """Return a model's output whose logits are computed once, when they are read.

    Its items are those that are given: code that goes through all of them computes no logits.

    Args:
        output_type: The type of the model's output.
        fields: All but the logits.
        read: Returns the logits.
    """
    output = _subclass(output_type)(**fields)
    object.__setattr__(output, _READ, read)
    return output


@functools.cache
def _subclass(output_type: Any) -> type:
    def get_attribute(self: Any, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name == _LOGITS and value is None and _READ in vars(self):
            value = vars(self)[_READ]()
            object.__setattr__(self, name, value)
        return value

    def names_of(self: Any) -> list[str]:
        fields = dict.fromkeys(getattr(output_type, "__dataclass_fields__", (_LOGITS,)))
        return [name for name in fields | dict.fromkeys(self.keys()) if name in self]

    def contains(self: Any, name: object) -> bool:
        is_on_demand = name == _LOGITS and _READ in vars(self)
        return is_on_demand or bool(output_type.__contains__(self, name))

    def get_item(self: Any, key: Any) -> Any:
        if isinstance(key, int):
            return self[names_of(self)[key]]
        if isinstance(key, slice):
            return tuple(self[name] for name in names_of(self)[key])
        is_on_demand = key == _LOGITS and _READ in vars(self)
        return self.logits if is_on_demand else output_type.__getitem__(self, key)

    def get(self: Any, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def to_tuple(self: Any) -> tuple[Any, ...]:
        return tuple(self[:])

    methods: dict[str, Any] = {"__getattribute__": get_attribute}
    if issubclass(output_type, Mapping):
        methods |= {"__contains__": contains, "__getitem__": get_item}
        methods |= {"get": get, "to_tuple": to_tuple}
    return type(output_type.__name__, (output_type,), methods)
