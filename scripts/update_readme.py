#!/usr/bin/env python3
"""Writes the configuration table of README.md from memascend/config/block.py.

tests/test_docs.py fails when the two disagree; this script is how to make them agree again.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from memascend.config.block import MemAscendConfig
from memascend.config.messages import section_in, takes_units

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN = "<!-- config-table: written by scripts/update_readme.py -->"
END = "<!-- end of config-table -->"


def table() -> str:
    """Gives the table, one row for each key, in the order of the block."""
    lines = ["| key | takes | default | meaning |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in _rows(MemAscendConfig, "")]
    return "\n".join(lines)


def _rows(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, ...]]:
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield f"**`{prefix}{name}`**", "section", "on", (inner.__doc__ or "").strip()
            yield from _rows(inner, f"{prefix}{name}.")
            continue
        element = section_in(inner)
        takes = _takes(section, name, field) if element is None else "list of paths or objects"
        yield f"`{prefix}{name}`", takes, _default(field.default), field.description or ""
        if element is not None:
            yield from _rows(element, f"{prefix}{name}[].")


def _takes(section: type[BaseModel], name: str, field: FieldInfo) -> str:
    kinds = [_kind(kind) for kind in _alternatives(field.annotation) if kind is not type(None)]
    bounds = []
    for rule in field.metadata:
        for attribute, words in (("ge", "at least"), ("le", "at most")):
            if getattr(rule, attribute, None) is not None:
                bounds.append(f"{words} {getattr(rule, attribute)}")
    text = ", ".join([*kinds, *bounds])
    return f'{text}; or text, "1MiB"' if takes_units(section, name) else text


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def _kind(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(f'"{value}"' for value in typing.get_args(annotation))
    return str(annotation.__name__)


def _default(value: Any) -> str:
    if value is None:
        return "automatic"
    if value is PydanticUndefined:
        return "required"
    return str(value).lower() if isinstance(value, bool) else str(value)


def replaced(text: str) -> str:
    """Gives the text with the table between its marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{README} has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> None:
    """Rewrites the file."""
    README.write_text(replaced(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
