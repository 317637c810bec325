"""The machine that `memascend plan` compares with: this one, or sizes that the options state."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from memascend.cli.plan_sizes import device_bytes_of, drive_space_of, existing, host_bytes_of
from memascend.cli.plan_time import drive_count_of, ranks_of_node
from memascend.config.volumes import VolumeConfig
from memascend.errors import ConfigError
from memascend.system.gpus import list_gpus
from memascend.system.memory import memory_total


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine; None for an unknown size."""

    memory_bytes: int | None  # host memory, for all its ranks
    device_bytes: int | None  # device memory of one rank
    free_bytes: int | None  # free space on the drives, as far as the volumes may use it
    place: str  # the folders that were asked for their free space; empty if that is stated
    drive_count: int  # drives that its ranks write to


def read_machine(args: argparse.Namespace, volumes: Sequence[VolumeConfig]) -> Machine:
    """Return the memory and drives of this machine; sizes that the options state come first.

    Without volumes the current folder is asked.

    Raises:
        ConfigError: --path, or the folder of a volume, is no folder.
    """
    ranks = ranks_of_node(args)
    host_bytes, device_bytes = host_bytes_of(args), device_bytes_of(args)
    memory_bytes = None if host_bytes is None else ranks * host_bytes
    if memory_bytes is None:
        with contextlib.suppress(ConfigError):
            memory_bytes = memory_total()
    if device_bytes is None:
        device_bytes = min((gpu.memory_bytes for gpu in list_gpus()), default=None)
    if args.path is not None and not os.path.isdir(args.path):
        raise ConfigError(f"--path {args.path} is not a folder")
    free_bytes, place = drive_space_of(args), ""
    if free_bytes is None:
        free_bytes, place = _free_space(volumes or [VolumeConfig(path=os.getcwd())])
    return Machine(
        memory_bytes=memory_bytes,
        device_bytes=device_bytes,
        free_bytes=free_bytes,
        place=place,
        drive_count=drive_count_of([volume.path for volume in volumes]),
    )


def _free_space(volumes: Sequence[VolumeConfig]) -> tuple[int | None, str]:
    """Return the bytes that volumes may use, None if that is not known; and their places.

    Folders of one file system share its free space.
    """
    systems: dict[int, tuple[str, int | None, list[int | None]]] = {}  # place, free, capacities
    for number, volume in enumerate(volumes):
        if volume.raw:
            system, place, nbytes = -1 - number, volume.path, _device_bytes(volume.path)
        else:
            place = existing(volume.path)
            if not os.path.isdir(place):
                raise ConfigError(
                    f"{volume.path} cannot be a folder on a drive: {place} is none. Name a folder, "
                    'or a device with "raw": true in memascend.volumes'
                )
            system, nbytes = os.stat(place).st_dev, shutil.disk_usage(place).free
        systems.setdefault(system, (place, nbytes, []))[2].append(volume.capacity)
    total_bytes = 0
    for _, nbytes, capacities in systems.values():
        if nbytes is None:
            return None, ""
        stated = [one for one in capacities if one is not None]
        is_bounded = len(stated) == len(capacities)
        total_bytes += min(nbytes, sum(stated)) if is_bounded else nbytes
    return total_bytes, ", ".join(place for place, _, _ in systems.values())


def _device_bytes(path: str) -> int | None:
    """Return the size of a block device, None if it is not here or cannot be read.

    Raises:
        ConfigError: Something else is there.
    """
    try:
        if not stat.S_ISBLK(os.stat(path).st_mode):
            raise ConfigError(
                f'{path} is no block device, and has "raw": true in memascend.volumes'
            )
        with open(path, "rb") as device:
            return device.seek(0, os.SEEK_END)
    except OSError:
        return None
