"""Reading a DeepSpeed configuration as DeepSpeed does, without it: JSON, or a dict from Python.

A dict may hold DeepSpeed's enums, its configuration objects, torch's dtypes and paths where JSON
has text, and text where JSON has a number. A key that is left out, or left to the trainer ("auto"),
has its default.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

from memascend.base.json_text import show_json
from memascend.errors import ConfigError

#: Where a tensor may be offloaded to.
DEVICES = ("none", "cpu", "nvme")
_PRECISIONS = {
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half"), "fp16"),
    **dict.fromkeys(("fp32", "float32", "float"), "fp32"),
}
_FLAGS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


class JsonSection(dict[str, Any]):
    """An object of the configuration, which knows its own key for messages."""

    def __init__(self, content: Mapping[str, Any], key: str) -> None:
        super().__init__(content)
        self.key = key


def section(parent: Mapping[str, Any], key: str) -> JsonSection:
    """Return a part of the configuration; one that is left out is empty.

    Raises:
        ConfigError: It is not an object.
    """
    found: Any = parent.get(key)
    if hasattr(found, "model_dump"):  # one of DeepSpeed's own
        found = found.model_dump(exclude_unset=True)
    if found is None:
        found = {}
    if not isinstance(found, Mapping):
        raise _refused(parent, key, found, "an object such as {}")
    return JsonSection(found, _full_key(parent, key))


def value(parent: Mapping[str, Any], key: str, default: Any) -> Any:
    """Return what a key holds; the default where it is left out or left to the trainer."""
    found = parent.get(key)
    if isinstance(found, Enum):
        found = found.value
    return default if found is None or found == "auto" else found


def whole(parent: Mapping[str, Any], key: str, default: int) -> int:
    """Return a whole number, which may be written as 1e9 or as text.

    Raises:
        ConfigError: Not a whole number, or negative.
    """
    found = number = value(parent, key, default)
    if isinstance(found, str):
        try:
            number = int(found) if found.isdigit() and len(found) < 20 else float(found)
        except ValueError:
            number = None
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not math.isfinite(number) or number < 0 or number != int(number):
        raise _refused(parent, key, found, "a whole number of at least 0")
    return int(number)


def flag(parent: Mapping[str, Any], key: str, default: bool) -> bool:
    """Return true or false, which may be text or a number.

    Raises:
        ConfigError: It is neither.
    """
    found = value(parent, key, default)
    known = _FLAGS.get(str(found).lower())
    if known is None:
        raise _refused(parent, key, found, "true or false")
    return known


def device(offload: Mapping[str, Any]) -> str:
    """Return the device of `offload_param` or `offload_optimizer`: one of DEVICES.

    Raises:
        ConfigError: It is none of them; names the nearest.
    """
    found = value(offload, "device", "none")
    if found not in DEVICES:
        raise _refused(offload, "device", found, " or ".join(map(show_json, DEVICES)), DEVICES)
    return str(found)


def precision(parent: Mapping[str, Any], key: str, default: str) -> str:
    """Return a dtype as "bf16", "fp16" or "fp32"; it may be torch's, or have any of its names.

    Raises:
        ConfigError: It is another one; names the nearest.
    """
    found = value(parent, key, default)
    known = _PRECISIONS.get(str(found).lower().removeprefix("torch."))
    if known is None:
        raise _refused(parent, key, found, '"bf16", "fp16" or "fp32"', tuple(_PRECISIONS))
    return known


def _full_key(parent: Mapping[str, Any], key: str) -> str:
    return f"{parent.key}.{key}" if isinstance(parent, JsonSection) else key


def _refused(
    parent: Mapping[str, Any], key: str, found: object, allowed: str, words: tuple[str, ...] = ()
) -> ConfigError:
    near = difflib.get_close_matches(str(found)[:100].lower(), words, n=1, cutoff=0.5)
    hint = f" Did you mean {show_json(near[0])}?" if near else ""
    return ConfigError(
        f"{_full_key(parent, key)}: {show_json(found)} is not allowed. Allowed: {allowed}.{hint}"
    )
