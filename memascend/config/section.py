"""Shared by the sections of the block: strict parsing, and the types of sizes and paths."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from memascend.base.units import parse_nbytes


class Section(BaseModel):
    """A part of the block: unknown keys and values of a wrong type are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def read_nbytes(value: object) -> object:
    """Convert text such as "64MiB", and a whole float such as 1e9, to an int; keep other values."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return parse_nbytes(value) if isinstance(value, str) else value


def check_path(value: str) -> str:
    """Return the path; raise ValueError for a null byte or half of a surrogate pair."""
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
