"""Messages about wrong keys of the block: the value, the allowed values, the nearest known key.

All names and bounds come from the pydantic models, so that they cannot go stale, and are written as
JSON, like the user's file.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from memascend.base.json_text import show_json
from memascend.config.section import read_nbytes
from memascend.errors import ConfigError

#: Further lines of a message are dropped.
LINE_COUNT_MAX = 40
#: Characters of a key that are shown, and compared with known keys.
NAME_LENGTH_MAX = 100
#: Likeness of a key, from 0 to 1, from which it may mean another.
NEAR_MIN = 0.6
#: Keys without which there is no such thing; others without a default are chosen at the start.
ABSENT = frozenset({"report", "micro_batches", "endurance", "write_budget"})

Path = tuple[str | int, ...]
_Model = TypeVar("_Model", bound=BaseModel)

#: Bounds of pydantic's rules.
_BOUNDS = {
    "ge": "at least {}",
    "gt": "above {}",
    "le": "at most {}",
    "min_length": "at least {} long",
    "multiple_of": "a multiple of {}",
}
_PLAIN_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def parse(model: type[_Model], content: Mapping[str, Any], *, root: str) -> _Model:
    """Return the validated model; `root` is its own key, empty for a whole file.

    Raises:
        ConfigError: Names every wrong key with its value, the allowed values and the nearest key.
    """
    try:
        return model.model_validate(dict(content))
    except ValidationError as error:
        raise ConfigError(explain(error, model=model, root=root)) from None


def explain(error: ValidationError, *, model: type[BaseModel], root: str) -> str:
    """Return a line for each wrong key; `root` is the model's own key, empty for a whole file."""
    lines: dict[str, None] = {}  # each once: pydantic reports a key for each of its types
    for entry in error.errors():
        if len(lines) == LINE_COUNT_MAX:
            lines["and more of that kind"] = None
            break
        lines[_explain_entry(dict(entry), model, root)] = None
    return "\n".join(lines)


def section_in(annotation: object) -> type[BaseModel] | None:
    """Return the model in a key's type, or in its elements' type; None for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (section_in(part) for part in typing.get_args(annotation))
    return next((section for section in found if section is not None), None)


def _explain_entry(entry: dict[str, Any], model: type[BaseModel], root: str) -> str:
    path = _key_path(entry["loc"], model)
    dotted = _dotted(path, root)
    section = _section_at(path[:-1], model)
    name = str(path[-1]) if path else ""
    known = sorted(section.model_fields)
    if entry["type"] == "extra_forbidden":
        hint = _hint(name, section, model, root)
        return f"{dotted}: unknown key. Known: {', '.join(known)}.{hint}"
    if entry["type"] == "missing":
        return f"{dotted} is missing in {show_json(entry['input'])}. {_allowed(section, name)}."
    reason = str(entry["msg"]).removeprefix("Value error, ")
    if reason.startswith(dotted):
        return reason  # the message is complete
    text = f"{dotted}: {show_json(entry['input'])} is not allowed"
    if path and isinstance(path[-1], int):
        return f"{text}. Allowed: a path, or an object with one."
    if name not in section.model_fields:
        return f"{text} as a key. Known: {', '.join(known)}."
    if entry["type"] == "value_error":
        text += f" ({reason})"
    nearest = _nearest_word(section, name, entry["input"])
    advice = _advice(section, name) if root else ""  # another program may have other defaults
    return f"{text}. {_allowed(section, name)}.{nearest}{advice}"


def _hint(name: str, section: type[BaseModel], model: type[BaseModel], root: str) -> str:
    """Return the key that an unknown one may mean: the same in another section, or a near one."""
    if name == "enabled":
        return " Leave the section out to turn it off."
    name = name[:NAME_LENGTH_MAX].lower()
    found = [path for path in _paths_of(model) if path[-1] == name]
    if not found:
        near = difflib.get_close_matches(name, section.model_fields, n=1, cutoff=NEAR_MIN)
        return f" Did you mean {near[0]!r}?" if near else ""
    names = (name if len(path) == 1 else _dotted(path, root) for path in found)
    return f" Did you mean {' or '.join(map(repr, names))}?"


def _paths_of(model: type[BaseModel], above: Path = ()) -> Iterator[Path]:
    """Iterate over the keys of a model and of its sections."""
    for name, field in model.model_fields.items():
        yield (*above, name)
        if (inner := section_in(field.annotation)) is not None:
            yield from _paths_of(inner, (*above, name))


def _key_path(location: Sequence[str | int], model: type[BaseModel]) -> Path:
    """Drop the names of types, which pydantic appends to a key that takes several types."""
    path = tuple(location)
    while len(path) > 1 and isinstance(path[-1], str):
        parent = _section_at(path[:-2], model).model_fields.get(str(path[-2]))
        if parent is None or section_in(parent.annotation) is not None:
            break
        path = path[:-1]
    return path


def _section_at(path: Path, model: type[BaseModel]) -> type[BaseModel]:
    section = model
    for name in path:
        if isinstance(name, int):
            continue  # an index; the key before it has the type of the elements
        field = section.model_fields.get(name)
        inner = section_in(field.annotation) if field else None
        if inner is None:
            break
        section = inner
    return section


def _allowed(section: type[BaseModel], name: str) -> str:
    field = section.model_fields[name]
    words = [_words(part) for part in _plain_types(field.annotation) if part is not type(None)]
    if takes_units(section, name):
        words.append('text such as "512MiB" or "2GB"')
    bounds = [
        text.format(getattr(rule, bound))
        for rule in rules_of(field)
        for bound, text in _BOUNDS.items()
        if getattr(rule, bound, None) is not None
    ]
    return f"Allowed: {' or '.join(words)}" + (f", {' and '.join(bounds)}" if bounds else "")


def rules_of(field: FieldInfo) -> list[Any]:
    """Return the bounds of a key, also those of one of its types."""
    inner = [rule for part in typing.get_args(field.annotation) for rule in _rules_of_type(part)]
    return [*field.metadata, *inner]


def _rules_of_type(annotation: object) -> Iterator[Any]:
    for rule in getattr(annotation, "__metadata__", ()):  # of Annotated
        yield from rule.metadata if isinstance(rule, FieldInfo) else (rule,)


def _nearest_word(section: type[BaseModel], name: str, found: object) -> str:
    types = _plain_types(section.model_fields[name].annotation)
    words = [word for part in types for word in map(str, _choices(part))]
    near = difflib.get_close_matches(str(found)[:NAME_LENGTH_MAX].lower(), words, n=1, cutoff=0.5)
    return f" Did you mean {show_json(near[0])}?" if near else ""


def _choices(annotation: object) -> tuple[Any, ...]:
    return typing.get_args(annotation) if typing.get_origin(annotation) is Literal else ()


def _advice(section: type[BaseModel], name: str) -> str:
    field = section.model_fields[name]
    if field.is_required():
        return ""
    if name in ABSENT:
        return " Leave the key out for none."
    if field.default is None or isinstance(field.default, BaseModel):
        return " Leave the key out for automatic."
    return f" Leave the key out for {show_json(field.default)}."


def _plain_types(annotation: object) -> Iterator[object]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for part in typing.get_args(annotation):
            yield from _plain_types(part)
    elif typing.get_origin(annotation) is Annotated:
        yield from _plain_types(typing.get_args(annotation)[0])
    else:
        yield annotation


def _words(annotation: object) -> str:
    if choices := _choices(annotation):
        return " or ".join(map(show_json, choices))
    for kind, words in _PLAIN_WORDS.items():
        if annotation is kind:
            return words
    if isinstance(annotation, type) and "enabled" in getattr(annotation, "model_fields", {}):
        return 'an object such as {"enabled": false}'
    return "a list" if typing.get_origin(annotation) is tuple else "an object such as {}"


def takes_units(section: type[BaseModel], name: str) -> bool:
    """Return True if a key is a size, which may be text with a unit."""
    field = section.model_fields[name]
    # `Nbytes` has its rule in the field's metadata; `Nbytes | None` has it in the type's arguments.
    parts = (field.metadata, *map(typing.get_args, typing.get_args(field.annotation)))
    return any(getattr(rule, "func", None) is read_nbytes for part in parts for rule in part)


def _dotted(path: Path, root: str) -> str:
    parts = (
        f"[{part}]" if isinstance(part, int) else f".{part[:NAME_LENGTH_MAX]}" for part in path
    )
    return (root + "".join(parts)).removeprefix(".")
