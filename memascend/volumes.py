"""The volumes of a store, from what the configuration says: looked at, weighed, ready to open.

Knows directories, the configuration and the core; nothing of tensors or DeepSpeed.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from memascend import _core
from memascend.config import MemAscendConfig, cache_directory
from memascend.config_volumes import KEY, VolumeConfig
from memascend.errors import ConfigError, StoreError
from memascend.nvme import make_directory
from memascend.volume_speed import Load
from memascend.volume_weights import PROBE_SECONDS, PROBE_SPAN_BYTES, measured_weights

log = logging.getLogger(__name__)


def volume_paths(config: MemAscendConfig, fallback: str) -> list[str]:
    """The paths that will be used.

    Args:
        config: The validated block.
        fallback: DeepSpeed's nvme_path, for a block without `volumes`.
    """
    return [volume.path for volume in config.volumes] if config.volumes else [fallback]


def prepare(
    config: MemAscendConfig, fallback: str, *, cache: Path | None = None
) -> list[_core.VolumeOptions]:
    """Makes the directories that are missing, looks at all of them, and weighs them.

    Args:
        config: The validated block.
        fallback: DeepSpeed's nvme_path, for a block without `volumes`.
        cache: Folder where measured weights are kept; None: the user's.

    Raises:
        ConfigError: Two paths are one directory.
        StoreError: A directory cannot be made or written.
    """
    if not config.volumes:
        return [_directory(VolumeConfig(path=fallback))]
    opened = [_directory(volume) for volume in config.volumes]
    _check_apart(opened)
    if len(opened) == 1:
        return opened
    if config.volumes[0].weight is not None:
        stated = ", ".join(f"{volume.path}={volume.weight:g}" for volume in opened)
        log.info("volumes: weights %s, as stated in %s", stated, KEY)
        return opened
    section = config.direct_nvme
    load = Load(
        chunk_bytes=section.chunk_bytes,
        queue_depth=section.queue_depth,
        engine=section.engine or "auto",
        threads=section.threads,
        span_bytes=PROBE_SPAN_BYTES,
        fill_seconds=PROBE_SECONDS,
    )
    weights = measured_weights(opened, load=load, cache=cache or cache_directory())
    return [_weighed(volume, weight) for volume, weight in zip(opened, weights, strict=True)]


def _directory(volume: VolumeConfig) -> _core.VolumeOptions:
    """A volume in a directory that is there and can be written. Follows symbolic links, once.

    Raises:
        StoreError: It is not, or cannot.
    """
    path = os.path.realpath(volume.path)
    try:
        make_directory(path)
    except OSError as error:
        raise refused(volume.path, "make", error.errno or errno.EIO) from error
    return look_at(volume)


def look_at(volume: VolumeConfig) -> _core.VolumeOptions:
    """The same for a directory that has to be there."""
    path = os.path.realpath(volume.path)
    try:
        state = os.stat(path)
    except OSError as error:
        raise refused(volume.path, "use", error.errno or errno.EIO) from error
    if stat.S_ISBLK(state.st_mode):
        raise refused(
            volume.path,
            "use",
            errno.ENOTDIR,
            cause="it is a block device",
            fix=f'name a directory on it, or say {{"path": "{volume.path}", "raw": true}}, which '
            "destroys what is on it",
        )
    if not stat.S_ISDIR(state.st_mode):
        raise refused(volume.path, "use", errno.ENOTDIR)
    if not os.access(path, os.W_OK | os.X_OK):
        raise refused(volume.path, "write in", errno.EACCES)
    return _options(path, volume)


def _options(path: str, volume: VolumeConfig) -> _core.VolumeOptions:
    weight = 1.0 if volume.weight is None else volume.weight
    if volume.capacity is None:
        return _core.VolumeOptions(path, weight=weight)
    return _core.VolumeOptions(path, weight=weight, capacity_bytes=volume.capacity)


def _weighed(volume: _core.VolumeOptions, weight: float) -> _core.VolumeOptions:
    return _core.VolumeOptions(volume.path, weight=weight, capacity_bytes=volume.capacity_bytes)


def _check_apart(volumes: Sequence[_core.VolumeOptions]) -> None:
    """Refuses one directory under two names; warns of two on one drive."""
    seen: dict[tuple[int, int], str] = {}
    drives: dict[int, str] = {}
    for volume in volumes:
        state = os.stat(volume.path)
        place = (state.st_dev, state.st_ino)
        if place in seen:
            raise ConfigError(
                f"{KEY}: {seen[place]} and {volume.path} are the same directory. Name each drive "
                "once; a larger weight gives it more of the bytes"
            )
        seen[place] = volume.path
        if state.st_dev in drives:
            log.warning(
                "%s: %s and %s are on one file system: that drive gets both shares and is no "
                "faster for it. Name one directory on each drive",
                KEY,
                drives[state.st_dev],
                volume.path,
            )
        drives.setdefault(state.st_dev, volume.path)


def refused(path: str, verb: str, code: int, *, cause: str = "", fix: str = "") -> StoreError:
    """The error for a volume that cannot be used."""
    cause = cause or f"{KEY} or nvme_path is misspelt, not mounted, or belongs to another user"
    error = StoreError(
        code,
        f"cannot {verb} the volume {path}: {os.strerror(code)}\n"
        f"likely cause: {cause}\n"
        f"fix: {fix or 'name a directory on a local disk that you can write'}",
    )
    error.volume = path
    return error
