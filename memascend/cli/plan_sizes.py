"""Sizes that options of `memascend plan` state, and the folders that stand for missing ones."""

from __future__ import annotations

import argparse
import os

from memascend.base.units import parse_nbytes
from memascend.errors import ConfigError


def device_bytes_of(args: argparse.Namespace) -> int | None:
    """Return --device-memory in bytes; None without it."""
    return _size(args.device_memory, "--device-memory")


def host_bytes_of(args: argparse.Namespace) -> int | None:
    """Return --host-memory, that of one rank, in bytes; None without it."""
    return _size(args.host_memory, "--host-memory")


def drive_space_of(args: argparse.Namespace) -> int | None:
    """Return --drive-space, that of one machine, in bytes; None without it."""
    return _size(args.drive_space, "--drive-space")


def existing(path: str) -> str:
    """Return a path, or the nearest folder above it that exists: a run makes the missing ones.

    A device that is not there stays as it is.
    """
    above = os.path.abspath(path)
    if above.startswith("/dev/"):
        return above
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    return above


def _size(text: str | None, option: str) -> int | None:
    if text is None:
        return None
    try:
        nbytes = parse_nbytes(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error
    if nbytes == 0:
        raise ConfigError(f"{option}: must be above 0 bytes, got {text}")
    return nbytes
