"""Shared by the sections of the block: strictness, and the types of sizes and of paths."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from memascend.base.units import parse_nbytes


class Section(BaseModel):
    """A part of the block: unknown keys and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def read_nbytes(value: object) -> object:
    """Make a whole number of text such as "64MiB", and of 1e9; leave the rest to the check."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return parse_nbytes(value) if isinstance(value, str) else value


def check_path(value: str) -> str:
    """Return a path that a file can have.

    Raises:
        ValueError: It has a null byte, or half of a character.
    """
    if "\0" in value:
        raise ValueError("a path has no null byte")
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        raise ValueError("a path has no half of a surrogate pair") from None
    return value


def _read_path(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


#: A number of bytes, or text with a unit.
Nbytes = Annotated[int, BeforeValidator(read_nbytes)]
#: Text, or a Path from Python.
PathText = Annotated[str, BeforeValidator(_read_path), AfterValidator(check_path)]
