"""Reads JSON of unknown origin, with one kind of error for every defect, and shows it in messages.

The text may be malicious or damaged: nested deeper than the interpreter's recursion limit, with
numbers too long to convert or values too long to print. Imports nothing of ours but errors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memascend.errors import ConfigError

_SHOWN_DEPTH_MAX = 4
_SHOWN_COUNT_MAX = 8  # of the elements of a list or an object
_SHOWN_LETTERS_MAX = 200  # of a string or a number


def parse_json(text: str | bytes) -> object:
    """Parse a JSON document.

    Raises:
        ValueError: It is not JSON or not UTF-8, is nested too deeply, has a number with too many
            digits, or has a key twice in one object.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json_object(path: Path, name: str = "") -> dict[str, Any]:
    """Read a file that holds one JSON object; messages have its name, if any, before the path.

    Raises:
        ConfigError: It cannot be read, is empty, is not JSON, or is not an object.
    """
    name = f"{name} {path}".lstrip()
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from error
    if not text.strip():
        raise ConfigError(f"{name} is empty: the program that should have written it failed")
    try:
        content = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{name} must hold a JSON object, got {show_json(content)}")
    return content


def show_json(value: object) -> str:
    """Return the value for a message, as JSON if its type allows, shortened if it is long."""
    return _show(value, _SHOWN_DEPTH_MAX)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {show_json(twice)} occurs twice")
    return made


def _show(value: object, depth: int) -> str:
    if isinstance(value, str):
        rest = "..." if len(value) > _SHOWN_LETTERS_MAX else ""
        return json.dumps(value[:_SHOWN_LETTERS_MAX] + rest)
    if isinstance(value, Mapping | list | tuple):
        return _show_many(value, depth - 1)
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = f"a {type(value).__name__}" if isinstance(value, int) else repr(value)
    return text if len(text) <= _SHOWN_LETTERS_MAX else f"{text[:_SHOWN_LETTERS_MAX]}..."


def _show_many(
    value: Mapping[object, object] | list[object] | tuple[object, ...], depth: int
) -> str:
    opening, closing = "{}" if isinstance(value, Mapping) else "[]"
    if depth < 0 and value:
        return f"{opening}...{closing}"
    parts = []
    for index, item in enumerate(value):
        if index == _SHOWN_COUNT_MAX:
            parts.append("...")
            break
        part = _show(item, depth)
        parts.append(f"{part}: {_show(value[item], depth)}" if isinstance(value, Mapping) else part)
    return f"{opening}{', '.join(parts)}{closing}"
