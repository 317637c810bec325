"""Sizes that options of `memascend plan` state, and the folders that stand for missing ones."""

from __future__ import annotations

import argparse
import os

from memascend.base.units import parse_nbytes


def device_bytes_of(args: argparse.Namespace) -> int | None:
    """Return --device-memory in bytes; None without it."""
    return None if args.device_memory is None else parse_nbytes(args.device_memory)


def host_bytes_of(args: argparse.Namespace) -> int | None:
    """Return --host-memory, that of one rank, in bytes; None without it."""
    return None if args.host_memory is None else parse_nbytes(args.host_memory)


def drive_space_of(args: argparse.Namespace) -> int | None:
    """Return --drive-space, that of one machine, in bytes; None without it."""
    return None if args.drive_space is None else parse_nbytes(args.drive_space)


def existing(path: str) -> str:
    """Return a path, or the nearest folder above it that exists: a run makes the missing ones.

    A device that is not there stays as it is.
    """
    above = os.path.abspath(path)
    if above.startswith("/dev/") and not above.startswith("/dev/shm/"):
        return above
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    return above
