"""Directories as volumes: created if missing, and checked before use."""

from __future__ import annotations

import errno
import logging
import os
import stat

from memascend import _core
from memascend.config.environment import local_rank
from memascend.config.volumes import VolumeConfig
from memascend.nvme.store import volume_error
from memascend.system.mounts import IN_MEMORY, filesystem_of

log = logging.getLogger(__name__)


def provide_directory(path: str | os.PathLike[str]) -> None:
    """Create a directory and its missing parents, for its owner alone; keep existing ones.

    Raises:
        StoreError: It cannot be created.
    """
    missing = []
    above = os.path.abspath(path)
    while not os.path.lexists(above):
        missing.append(above)
        above = os.path.dirname(above)
    for directory in reversed(missing):
        try:
            os.mkdir(directory, 0o700)
        except OSError as error:
            if isinstance(error, FileExistsError) and os.path.isdir(directory):
                continue  # another rank was faster
            raise volume_error(os.fspath(path), "make", error.errno or errno.EIO) from error


def provide_volume(volume: VolumeConfig) -> _core.VolumeOptions:
    """Return a volume in a directory, which is created if missing.

    Symbolic links are resolved here. The core follows none, in no component of the path, so that
    the path cannot be redirected between this check and the open.

    Raises:
        StoreError: It cannot be created or written.
    """
    path = os.path.realpath(volume.path)
    if path.startswith("/dev/") and not os.path.lexists(path):  # a folder there would be in memory
        raise volume_error(volume.path, "use", errno.ENOENT, cause="a device that is not there")
    is_first = local_rank() == 0
    if not os.path.isdir(path) and is_first:
        log.warning(
            "memascend: the volume %s does not exist and is made, on the drive of the folder above "
            "it. Is a drive not mounted, or the path misspelt?",
            volume.path,
        )
    provide_directory(path)
    if filesystem_of(path) in IN_MEMORY and is_first:
        log.warning(
            "memascend: %s is in memory: data offloaded to it takes host memory beyond every "
            "limit. Name a folder on an SSD",
            path,
        )
    return existing_volume(volume)


def existing_volume(volume: VolumeConfig) -> _core.VolumeOptions:
    """Return a volume in a directory that exists.

    Raises:
        StoreError: It is missing, no directory, or cannot be written.
    """
    path = os.path.realpath(volume.path)
    try:
        state = os.stat(path)
    except OSError as error:
        raise volume_error(volume.path, "use", error.errno or errno.EIO) from error
    if stat.S_ISBLK(state.st_mode):
        raise volume_error(
            volume.path,
            "use",
            errno.ENOTDIR,
            cause="it is a block device",
            fix=f'name a directory on it, or write {{"path": "{volume.path}", "raw": true}}, which '
            "destroys what is on it",
        )
    if not stat.S_ISDIR(state.st_mode):
        raise volume_error(volume.path, "use", errno.ENOTDIR)
    # With the effective ids, which will open the files: a launcher may have changed user or
    # capabilities.
    if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
        is_read_only = os.statvfs(path).f_flag & os.ST_RDONLY
        code = errno.EROFS if is_read_only else errno.EACCES
        raise volume_error(volume.path, "write in", code)
    weight = 1.0 if volume.weight is None else volume.weight
    if volume.capacity is None:
        return _core.VolumeOptions(path, weight=weight)
    return _core.VolumeOptions(path, weight=weight, capacity_bytes=volume.capacity)
