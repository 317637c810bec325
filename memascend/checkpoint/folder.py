"""A checkpoint's folder appears at once or not at all, whenever the machine stops.

It is written under a working name beside its place, made durable, and renamed when it is complete;
`latest` follows after that. Where the tag exists already the two folders change places in one step,
so that there is no moment without a complete one. What a killed save left behind is removed by the
next. Knows the file system alone; one process (the leader) calls for all ranks.
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
#: What belongs to a checkpoint and is replaced with it; anything else in a tag's folder is kept.
_CHECKPOINT_FILES = ("*_states.pt", "*optim_states.pt", "memascend-rank*.json", "offloaded_tensors")

#: Renaming is quick, removing what was replaced takes a while on a slow drive.
_PATIENCE_S = 600.0
#: Who has renamed or removed a working folder has nothing left to do but to give its lock back.
_RELEASE_S = 10.0

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class SavingFolder:
    """The working folder of one save."""

    def __init__(self, save_dir: str, tag: str) -> None:
        """Take names only; `begin` makes the folder.

        Raises:
            CheckpointError: The tag leads out of `save_dir`.
        """
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
        #: What to save under instead of the tag.
        self.tag = str(self.path.relative_to(self._save_dir))
        self._lock: int | None = None

    def begin(self) -> None:
        """Remove what killed saves left, and make the working folder.

        Raises:
            CheckpointError: Another run is saving under this tag.
            OSError: The folder cannot be made.
        """
        self._parent.mkdir(parents=True, exist_ok=True)
        with _alone_in(self._parent):
            _clean(self._parent)
            try:
                self.path.mkdir()
            except FileExistsError as error:
                raise CheckpointError(
                    f"cannot save to {self.target}: {self.path} exists. Likely cause: another run "
                    "is saving there. Give each run a folder of its own; if there is no other, "
                    "remove it"
                ) from error
            self._lock = _try_lock(_lock_of(self.path), _RELEASE_S)

    def publish(self) -> None:
        """Make the folders durable and put the checkpoint in its place. Files are durable.

        Raises:
            OSError: The file system refused; the checkpoint that was there before still is.
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
        self._unlock()

    def abandon(self) -> None:
        """Remove the working folder if the save did not come to its end."""
        if self._lock is not None or self.path.is_dir():
            shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _keep_others(self) -> None:
        """Keep what others put into the tag's folder."""
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
        # Between these two `clean` knows what to do.
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
    """Remove what killed saves left in a folder; what a living one writes stays.

    A checkpoint that was moved away and whose successor did not arrive is put back.
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
    # A save that was killed when its folder had been renamed left no more than its lock file.
    locks = parent.glob(f"{_PREFIX}*{_WORKING}{_lock_ending()}")
    names = {path.name.removesuffix(_lock_ending()) for path in locks}
    for name in sorted(names | {path.name for path in _left(parent, _WORKING)}):
        left = parent / name
        lock = _try_lock(_lock_of(left))
        if lock is None:
            continue
        if _is_own(left):  # nobody can see the lock of another user
            shutil.rmtree(left, ignore_errors=True)
        release_lock_file(lock, _lock_of(left))


def check_space(folder: Path, nbytes: int, failure: str, remedy: str) -> None:
    """Refuse before hours are spent: is there room?

    Args:
        folder: On the file system that is written to.
        nbytes: How many bytes are going to be written.
        failure: How the message begins.
        remedy: What else can be done than removing older checkpoints.

    Raises:
        CheckpointError: There is too little space.
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
    """Return the lock file of a folder that must be seen by its name, so it is beside that."""
    return folder.with_name(folder.name + _lock_ending())


def _try_lock(path: Path, seconds: float = 0.0) -> int | None:
    """Return a descriptor that holds the lock; None where a living process does for so long.

    Where locks do not work nobody can tell, and the folder is left alone.
    """
    try:
        return take_lock_file(path, seconds)
    except OSError:
        return None


@contextmanager
def _alone_in(parent: Path) -> Iterator[None]:
    """Keep other runs from making, renaming or removing working folders here; where locks work.

    Without it two runs that save the same tag would take each other's new folder, still without a
    lock, or old one, which has none, for a killed save's.

    Raises:
        CheckpointError: Another run does not come to an end of it.
    """
    path = parent / f"{_PREFIX}saves{_lock_ending()}"
    try:
        descriptor = take_lock_file(path, _PATIENCE_S)
    except OSError as error:
        if os.path.lexists(path):  # else there are no locks here
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
    """Let two folders change places in one step; False where the system cannot."""
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
