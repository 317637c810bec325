"""The volumes of a store, from the configuration: checked, weighted, ready to open.

Knows directories, devices, the configuration and the core; nothing of tensors or DeepSpeed.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from memascend import _core
from memascend.config.block import MemAscendConfig
from memascend.config.environment import cache_directory, local_rank, local_world_size
from memascend.config.volumes import KEY, VolumeConfig
from memascend.errors import ConfigError
from memascend.system.numa import processors_near
from memascend.volumes.device import formatted
from memascend.volumes.directory import provide_volume
from memascend.volumes.header import START_BYTES
from memascend.volumes.speed import Load
from memascend.volumes.weights import PROBE_SECONDS, PROBE_SPAN_BYTES, measured_weights

log = logging.getLogger(__name__)


def volume_paths(config: MemAscendConfig, fallback: str) -> list[str]:
    """Return the paths of the volumes: DeepSpeed's nvme_path for a block without `volumes`."""
    return [volume.path for volume in config.volumes] if config.volumes else [fallback]


@contextlib.contextmanager
def prepared(
    config: MemAscendConfig, fallback: str, *, cache: Path | None = None
) -> Iterator[list[_core.VolumeOptions]]:
    """Create missing directories, claim raw devices, and weight all volumes.

    A device is claimed while the context lasts; a store that was opened on it keeps the claim. A
    block without `volumes` has one: `fallback`, DeepSpeed's nvme_path.

    Raises:
        ConfigError: Two paths are the same directory or device, or this rank gets no volume.
        StoreError: A directory cannot be created or written, or a device cannot be used.
    """
    if not config.volumes:
        yield _near_drives([provide_volume(VolumeConfig(path=fallback))])
        return
    mine = share_of_rank(config.volumes, rank=local_rank(), rank_count=local_world_size())
    with contextlib.ExitStack() as claims:
        directories = [None if volume.raw else provide_volume(volume) for volume in mine]
        check_apart(mine)
        opened = [
            directory or claims.enter_context(claimed_device(volume))
            for volume, directory in zip(mine, directories, strict=True)
        ]
        yield _weighed(config, _near_drives(opened), cache or cache_directory())


def share_of_rank(
    volumes: Sequence[VolumeConfig], *, rank: int, rank_count: int
) -> list[VolumeConfig]:
    """Return the volumes of one rank of this machine: directories, and its part of the raw devices.

    Each rank has its own store. A directory may hold files of several ranks; a raw device belongs
    to one, so the devices are dealt to the ranks in turn.

    Raises:
        ConfigError: This rank gets no volume.
    """
    devices = [volume for volume in volumes if volume.raw]
    own = devices[rank % rank_count :: rank_count]
    mine = [volume for volume in volumes if not volume.raw or volume in own]
    if not mine:
        raise ConfigError(
            f"{KEY}: {len(devices)} raw devices for {rank_count} ranks on this machine. A raw "
            "device belongs to one rank: name at least as many (partitions will do), or a directory"
        )
    return mine


def _near_drives(volumes: list[_core.VolumeOptions]) -> list[_core.VolumeOptions]:
    for volume in volumes:
        volume.cpus = processors_near(volume.path)
    return volumes


def _weighed(
    config: MemAscendConfig, opened: list[_core.VolumeOptions], cache: Path
) -> list[_core.VolumeOptions]:
    if len(opened) == 1:
        return opened
    if config.volumes and config.volumes[0].weight is not None:
        stated = ", ".join(f"{volume.path}={volume.weight:g}" for volume in opened)
        log.info("volumes: weights %s, as stated in %s", stated, KEY)
        return opened
    section = config.direct_nvme
    load = Load(
        chunk_bytes=section.chunk_bytes,
        queue_depth=section.queue_depth,
        engine=section.engine or "auto",
        span_bytes=PROBE_SPAN_BYTES,
        fill_seconds=PROBE_SECONDS,
    )
    weights = measured_weights(opened, load=load, cache=cache)
    for volume, weight in zip(opened, weights, strict=True):
        volume.weight = weight
    return opened


@contextlib.contextmanager
def claimed_device(volume: VolumeConfig) -> Iterator[_core.VolumeOptions]:
    """Open a raw device with our header, and claim it; its errors are those of `formatted`."""
    with formatted(volume.path, needed_bytes=volume.capacity or 0) as (device, header):
        room_bytes = header.size_bytes - START_BYTES
        yield _core.VolumeOptions(
            device.path,
            weight=1.0 if volume.weight is None else volume.weight,
            capacity_bytes=room_bytes if volume.capacity is None else volume.capacity,
            descriptor=device.descriptor,
            start_bytes=START_BYTES,
        )


def check_apart(volumes: Sequence[VolumeConfig]) -> None:
    """Refuse two names of one directory or device; warn of two directories on one file system."""
    seen: dict[tuple[int, int], str] = {}
    drives: dict[int, str] = {}
    for volume in volumes:
        path = os.path.realpath(volume.path)
        if not os.path.exists(path):
            continue  # opening it will raise
        state = os.stat(path)
        place = (state.st_dev, state.st_ino)
        if place in seen:
            raise ConfigError(
                f"{KEY}: {seen[place]} and {volume.path} are the same. Name each drive once; a "
                "larger weight gives it more of the bytes"
            )
        seen[place] = volume.path
        if volume.raw:
            continue
        if state.st_dev in drives:
            log.warning(
                "%s: %s and %s are on one file system: that drive gets both shares and is no "
                "faster for it. Name one directory on each drive",
                KEY,
                drives[state.st_dev],
                path,
            )
        drives.setdefault(state.st_dev, path)
