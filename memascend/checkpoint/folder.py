"""Publishes a checkpoint's folder atomically, also if the machine stops at any moment.

The folder is written under a working name beside its target, synced, and renamed when it is
complete; `latest` is updated after that. If the tag exists, the two folders are exchanged in one
step, so that a complete one always exists. The next save removes leftovers of a killed one. Knows
only the file system; one process (the leader) calls for all ranks.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

from memascend.errors import CheckpointError
from memascend.system.files import replace_durably, sync
from memascend.system.locks import release_lock_file, take_lock_file

log = logging.getLogger(__name__)

_PREFIX = ".memascend-"
_WORKING, _REPLACED = ".saving", ".replaced"
#: Files that belong to a checkpoint and are replaced with it; other files in its folder are kept.
_CHECKPOINT_FILES = ("*_states.pt", "*optim_states.pt", "memascend-rank*.json", "offloaded_tensors")

#: Renaming is quick, but removing the replaced folder can be slow.
_PATIENCE_S = 600.0
#: A process that has renamed or removed a working folder only has to release its lock.
_RELEASE_S = 10.0

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class SavingFolder:
    """The working folder of one save."""

    def __init__(self, save_dir: str, tag: str) -> None:
        """Compute the paths; raise CheckpointError if the tag leads out of `save_dir`."""
        parts = Path(tag).parts
        if not parts or os.path.isabs(tag) or ".." in parts or "\0" in tag:
            raise CheckpointError(
                f"cannot save under tag {tag!r}: it is empty or leads out of save_dir. Use a plain "
                "name"
            )
        self._save_dir = Path(save_dir)
        self.target = self._save_dir / tag
        self._parent = self.target.parent
        self.path = self._parent / f"{_PREFIX}{self.target.name}{_WORKING}"
        #: The tag to save under, in place of the given one.
        self.tag = str(self.path.relative_to(self._save_dir))
        self._lock: int | None = None
        self._is_begun = False

    def begin(self) -> None:
        """Remove leftovers of killed saves, and create the working folder.

        Raises:
            CheckpointError: Another run is saving under this tag.
            OSError: The folder cannot be created.
        """
        self._parent.mkdir(parents=True, exist_ok=True)
        with _alone_in(self._parent):
            _clean(self._parent)
            try:
                self.path.mkdir()
                self._is_begun = True
                self._lock = _try_lock(_lock_of(self.path), _RELEASE_S)
            except FileExistsError as error:
                raise CheckpointError(
                    f"cannot save to {self.target}: {self.path} exists. Likely cause: another run "
                    "is saving there. Give each run a folder of its own; if there is no other, "
                    "remove it"
                ) from error
            except BaseException:  # a signal's handler raised: the folder may be there
                self.abandon()
                _clean(self._parent)
                raise

    def check_is_shared(self) -> None:
        """Check that this rank sees the working folder that the leader has made.

        Raises:
            CheckpointError: It does not, so its files would be missing in the checkpoint.
        """
        if not self.path.is_dir():
            raise CheckpointError(
                f"cannot save to {self.target}: this rank does not see {self.path}, which another "
                "rank has made. Likely cause: their machines have different folders there. Save "
                'to a folder that all machines share, or set "checkpoint": '
                '{"use_node_local_storage": true} in the DeepSpeed JSON'
            )

    def publish(self) -> None:
        """Sync the folders and move the checkpoint to its target. Files must be synced already.

        Raises:
            OSError: The file system refused; the previous checkpoint is still in place.
        """
        for folder, _, _ in os.walk(self.path):
            sync(Path(folder))
        with _alone_in(self._parent):
            if self.target.is_dir():
                self._keep_others()
                self._change_places()
            else:
                os.rename(self.path, self.target)
                sync(self._parent)
        self._is_begun = False
        self._unlock()

    def abandon(self) -> None:
        """Remove the working folder if the save did not complete."""
        try:
            if self._is_begun:
                shutil.rmtree(self.path, ignore_errors=True)
        finally:
            self._unlock()

    def _keep_others(self) -> None:
        """Copy files that do not belong to a checkpoint from the old folder into the new one."""
        for other in self.target.iterdir():
            is_ours = any(fnmatch(other.name, pattern) for pattern in _CHECKPOINT_FILES)
            place = self.path / other.name
            if is_ours or place.exists():
                continue
            if other.is_dir() and not other.is_symlink():
                shutil.copytree(other, place, symlinks=True, copy_function=_link)
            else:
                _link(other, place)
        sync(self.path)

    def _change_places(self) -> None:
        if _exchange(self.path, self.target):
            sync(self._parent)
            shutil.rmtree(self.path)
            return
        # If the process is killed between the two renames, `clean` repairs it.
        replaced = self._parent / f"{_PREFIX}{self.target.name}{_REPLACED}"
        os.rename(self.target, replaced)
        os.rename(self.path, self.target)
        sync(self._parent)
        shutil.rmtree(replaced)

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            release_lock_file(lock, _lock_of(self.path))


def clean(parent: Path) -> None:
    """Remove leftovers of killed saves in a folder; those of a running save stay.

    A checkpoint that was moved away, but not replaced, is moved back.
    """
    with _alone_in(parent):
        _clean(parent)


def _clean(parent: Path) -> None:
    for left in _left(parent, _REPLACED):
        target = parent / left.name[len(_PREFIX) : -len(_REPLACED)]
        if target.exists():
            shutil.rmtree(left, ignore_errors=True)
        else:
            with suppress(PermissionError):  # another user's
                os.rename(left, target)
                sync(parent)
    # A save that was killed after its folder was renamed left only its lock file.
    locks = parent.glob(f"{_PREFIX}*{_WORKING}{_lock_ending()}")
    names = {path.name.removesuffix(_lock_ending()) for path in locks}
    for name in sorted(names | {path.name for path in _left(parent, _WORKING)}):
        left = parent / name
        lock = _try_lock(_lock_of(left))
        if lock is None:
            continue
        try:
            if _is_own(left):  # the lock of another user cannot be tested
                shutil.rmtree(left, ignore_errors=True)
        finally:
            release_lock_file(lock, _lock_of(left))


def check_space(folder: Path, nbytes: int, failure: str, remedy: str) -> None:
    """Raise CheckpointError if the file system of a folder has less space than a save needs.

    `failure` begins the message; `remedy` is an alternative to removing older checkpoints.
    """
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < nbytes:
        raise CheckpointError(
            f"{failure}: {nbytes} bytes are needed, {free_bytes} are free. Likely cause: older "
            f"checkpoints. Remove some, or {remedy}"
        )


def write_latest(save_dir: str, tag: str, *, name: str = "latest") -> None:
    """Point the file `name` to a tag, in one step."""
    folder = Path(save_dir)
    with _alone_in(folder):
        replace_durably(folder / name, tag)


def _left(parent: Path, ending: str) -> list[Path]:
    found = parent.glob(f"{_PREFIX}*{ending}")
    return [path for path in found if path.is_dir() and not path.is_symlink()]


def _is_own(path: Path) -> bool:
    with suppress(OSError):
        return path.lstat().st_uid == os.geteuid()
    return False


def _lock_ending() -> str:
    return f".lock-{os.geteuid()}"


def _lock_of(folder: Path) -> Path:
    """Return the lock file of a working folder; it is beside it, since the folder is renamed."""
    return folder.with_name(folder.name + _lock_ending())


def _try_lock(path: Path, seconds: float = 0.0) -> int | None:
    """Return a descriptor that holds the lock; None if another process holds it for `seconds`.

    Also None if the file system has no locks: the caller then leaves the folder alone.
    """
    try:
        return take_lock_file(path, seconds)
    except OSError:
        return None


@contextmanager
def _alone_in(parent: Path) -> Iterator[None]:
    """Lock a folder so that no other run creates, renames or removes working folders in it.

    Without the lock, two runs that save the same tag could take each other's folder, while it has
    no lock file, for that of a killed save. If the file system has no locks, proceed without one.

    Raises:
        CheckpointError: Another run has held the lock for _PATIENCE_S.
    """
    path = parent / f"{_PREFIX}saves{_lock_ending()}"
    try:
        descriptor = take_lock_file(path, _PATIENCE_S)
    except OSError as error:
        if os.path.lexists(path):  # else this file system has no locks
            log.warning(
                "memascend: saving without a lock: %s: %s. Remove that file, or give each user a "
                "folder",
                path,
                error.strerror,
            )
        yield
        return
    if descriptor is None:
        raise CheckpointError(
            f"cannot save in {parent}: it has been locked for {_PATIENCE_S:.0f} s. Likely "
            "cause: another run that saves there is stopped. End it, or give each run a folder "
            "of its own"
        )
    try:
        yield
    finally:
        release_lock_file(descriptor, path)


def _link(source: str | Path, place: str | Path) -> None:
    try:
        os.link(source, place, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, place, follow_symlinks=False)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; return False if the system does not support it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    names = os.fsencode(one), os.fsencode(other)
    if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))
