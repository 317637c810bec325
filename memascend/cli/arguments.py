"""Converts words of the command line, and refuses wrong ones as mistakes of the command line."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path

from memascend.base.units import parse_nbytes
from memascend.errors import ConfigError
from memascend.plan.fit import TOKENS_MAX


def whole_number(text: str, most: int = TOKENS_MAX) -> int:
    """Return a count; raise ArgumentTypeError if it is not from 1 to `most`."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number <= most:
        raise ArgumentTypeError(f"must be a whole number from 1 to {most}, got {text[:40]}")
    return number


def size(text: str) -> str:
    """Return a size as it is written; raise ArgumentTypeError if it is none above 0."""
    try:
        nbytes = parse_nbytes(text)
    except ConfigError as error:
        raise ArgumentTypeError(str(error)) from error
    if nbytes == 0:
        raise ArgumentTypeError(f"must be above 0 bytes, got {text}")
    return text


def folder(text: str) -> Path:
    """Return a path; raise ArgumentTypeError for the empty one, which Path takes for `.`."""
    if not text:
        raise ArgumentTypeError("is empty: name a folder (perhaps a variable is not set)")
    return Path(text)
