"""`memascend volume format`, `show` and `wipe`: raw block devices."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import AbstractContextManager

from memascend.base.progress import Advance, byte_progress
from memascend.base.units import format_nbytes
from memascend.errors import StoreError
from memascend.volumes.device import (
    Device,
    claimed,
    find_users,
    format_device,
    looked_at,
    signatures,
    wipe_device,
)
from memascend.volumes.header import START_BYTES, UID_MAX, Header


def volume_device_command(args: argparse.Namespace) -> int:
    """Run one action and return the exit status."""
    actions = {"format": _format, "show": _show, "wipe": _wipe}
    return actions[args.action](args)


def _format(args: argparse.Namespace) -> int:
    owner_uid = _owner_uid() if args.owner is None else args.owner
    if not 0 <= owner_uid <= UID_MAX:
        print(f"memascend: --owner {owner_uid}: from 0 to {UID_MAX}", file=sys.stderr)
        return 2
    with claimed(args.device) as device:
        if not args.yes and not _asks(device, "format", "destroys everything on it"):
            return 1
        with _progress("formatting", device) as advance:
            header = format_device(device, owner_uid=owner_uid, advance=advance)
        block = {"volumes": [{"path": device.path, "raw": True}]}
        print(f"{device.path}: {format_nbytes(header.size_bytes)}, uuid {header.uuid}, for user")
        print(f'{owner_uid}. To use it: "memascend": {json.dumps(block)}')
    return 0


def _wipe(args: argparse.Namespace) -> int:
    with claimed(args.device) as device:
        is_ours = device.header() is not None  # else wipe_device refuses it
        if is_ours and not args.yes and not _asks(device, "wipe", "removes header and data"):
            return 1
        with _progress("wiping", device) as advance:
            is_empty = wipe_device(device, advance)
        if is_empty:
            print(f"{device.path}: wiped")
        else:
            print(
                f"{device.path}: header removed. The device cannot discard, so the data is still "
                f"there until it is overwritten: blkdiscard --zeroout {device.path}"
            )
    return 0


def _show(args: argparse.Namespace) -> int:
    with looked_at(args.device) as device:
        users = find_users(device.path)
        problem = ""
        try:
            header = device.header()
        except StoreError as error:
            header, problem = None, str(error)
        others = signatures(device) if header is None else []
    if args.json:
        found = {
            "path": device.path,
            "size_bytes": device.size_bytes,
            "users": users,
            "header": None if header is None else _as_dict(header),
            "signatures": others,
            "problem": problem,
        }
        print(json.dumps(found, indent=2))
        return 1 if problem else 0
    print(f"{device.path}: {format_nbytes(device.size_bytes)}")
    for user in users:
        print(f"  in use: {user}")
    for name in others:
        print(f"  carries {name}")
    if header is not None:
        print(f"  a raw volume of memascend, uuid {header.uuid}, for user {header.owner_uid}")
        print(f"  {format_nbytes(header.size_bytes - START_BYTES)} for data")
    elif problem:
        print(problem)
    elif not others:
        print("  nothing that is recognised")
    return 1 if problem else 0


def _as_dict(header: Header) -> dict[str, object]:
    return {
        "uuid": str(header.uuid),
        "size_bytes": header.size_bytes,
        "data_bytes": header.size_bytes - START_BYTES,
        "owner_uid": header.owner_uid,
    }


def _progress(verb: str, device: Device) -> AbstractContextManager[Advance]:
    return byte_progress(f"{verb} {device.path}", device.size_bytes, leads=True)


def _asks(device: Device, verb: str, consequence: str) -> bool:
    """Ask for the device's name; return whether it was typed. Never without a terminal."""
    print(f"memascend volume {verb} {device.path} ({format_nbytes(device.size_bytes)})")
    print(f"This {consequence}. Type the device's path to go on:", flush=True)
    if not sys.stdin.isatty():
        print("memascend: no terminal to ask on; --yes in a script", file=sys.stderr)
        return False
    if sys.stdin.readline().strip() == device.path:
        return True
    print("Nothing was changed.")
    return False


def _owner_uid() -> int:
    """Return the calling user, also behind sudo."""
    caller = os.environ.get("SUDO_UID", "")
    return int(caller) if os.geteuid() == 0 and caller.isdigit() else os.geteuid()
