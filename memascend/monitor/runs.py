"""Where runs of this machine lie: a folder for each, in it a file for each rank.

Without a word in the block all runs of a user are in one folder below /tmp: it is there on every
machine, and stays when the user logs out and the run goes on, as $XDG_RUNTIME_DIR does not.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from memascend.errors import ConfigError
from memascend.monitor.status import Status, read_status

#: Runs that have ended and are kept; older ones go when a new one begins.
ENDED_RUNS_KEPT = 8

_RUN_NAME = re.compile(r"\d{8}T\d{6}\.\d{3}-\d+")
_RANK_FILE = re.compile(r"rank-\d+\.json")


@dataclass(frozen=True, slots=True)
class RankFile:
    """What is known of one rank: its status, or the reason why there is none.

    Attributes:
        path: Of the file.
        status: None where it cannot be read.
        is_alive: Whether its process runs; None where this machine cannot know.
        problem: Why there is no status.
    """

    path: Path
    status: Status | None
    is_alive: bool | None
    problem: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come of it."""
        return self.status is not None and (self.status.is_finished or self.is_alive is False)


def default_root() -> Path:
    """Return the folder of this user's runs; it may not exist."""
    return Path(f"/tmp/memascend-{os.geteuid()}")


def run_name(milliseconds: int, pid: int) -> str:
    """Return the name of a run; the later it began, the later in the alphabet.

    Args:
        milliseconds: Since 1970, when it began.
        pid: Of rank 0.
    """
    began = datetime.fromtimestamp(milliseconds / 1000, timezone.utc)
    return f"{began:%Y%m%dT%H%M%S}.{milliseconds % 1000:03d}-{pid}"


def rank_path(root: Path, run: str, rank: int) -> Path:
    """Return the file of one rank."""
    return root / run / f"rank-{rank}.json"


def make_run(root: Path, run: str, *, is_shared: bool) -> None:
    """Make the folder of a run, and remove what is left of old ones.

    Args:
        root: Of runs.
        run: Its name.
        is_shared: Whether others may read it: a root that the user named. /tmp is everybody's to
            write to, and so the root there is its owner's alone.

    Raises:
        OSError: It cannot be made, or another user made it first.
    """
    if is_shared:
        root.mkdir(parents=True, exist_ok=True)
    else:
        with suppress(FileExistsError):
            root.mkdir(mode=0o700)
        check_own(root)
    _remove_old(root)
    (root / run).mkdir(exist_ok=True)


def check_own(folder: Path) -> None:
    """Refuse a folder in /tmp that another user may have prepared.

    Raises:
        PermissionError: It is a link, somebody else's, or for others to write to.
    """
    state = folder.lstat()
    is_own = stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid()
    if not is_own or state.st_mode & 0o022:
        raise PermissionError(f"{folder} is not a folder of this user alone")


def runs_in(root: Path) -> list[Path]:
    """Return the folders of runs, the latest first."""
    found = [path for path in _listed(root) if _RUN_NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: path.name, reverse=True)


def ranks_of(run: Path) -> list[RankFile]:
    """Return what is known of each rank of a run, by rank; empty for what is no run."""
    found = []
    for path in _listed(run):
        if not _RANK_FILE.fullmatch(path.name):
            continue
        try:
            status = read_status(path)
        except ConfigError as error:
            if path.exists():  # or it was removed meanwhile
                found.append(RankFile(path, None, None, str(error)))
        else:
            found.append(RankFile(path, status, status.process.is_alive()))
    return sorted(found, key=lambda rank: int(rank.path.stem.partition("-")[2]))


def find_run(name: str | None, root: Path | None = None) -> Path:
    """Return the folder of a run.

    Args:
        name: Its name, or a path: of it, of a folder of runs, of one rank's file. None: the latest
            that runs, else the latest.
        root: Of runs; left out: this user's.

    Raises:
        ConfigError: There is none; says what was looked for and where, and what there is. Or the
            folder of runs is another user's.
    """
    if root is None:
        root = default_root()
        _check_trusted(root)
    if name is None:
        return _latest(root)
    path = Path(name)
    for candidate in (root / name, path, path.parent):
        if _looks_like_run(candidate) and (candidate != path.parent or path.is_file()):
            return candidate
    if path.is_dir():
        return _latest(path)
    raise ConfigError(
        f"there is no run {name!r}: neither {root / name} nor {path.absolute()} is a folder with "
        f"rank-N.json in it. {_what_there_is(root)}"
    )


def _latest(root: Path) -> Path:
    found = [run for run in runs_in(root) if _looks_like_run(run)]
    if not found:
        raise ConfigError(
            f"no run was found: {root} has no folder of a run (a date and a number, with "
            "rank-N.json in it). likely cause: nothing trains here with a memascend block, "
            "memascend.status is false or names another folder, or it runs as another user or in a "
            "container. Name the folder: memascend monitor FOLDER"
        )
    return next((run for run in found if _is_running(run)), found[0])


def _is_running(run: Path) -> bool:
    """Return whether a rank of it runs, as far as known; one that cannot be read says nothing."""
    return any(rank.status is not None and not rank.has_ended for rank in ranks_of(run))


def _check_trusted(root: Path) -> None:
    try:
        check_own(root)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(
            f"cannot look for runs: {error}. likely cause: somebody else made it. Remove it, or "
            'name a folder in the block: "status": "/path"'
        ) from error


def _looks_like_run(folder: Path) -> bool:
    return any(_RANK_FILE.fullmatch(path.name) for path in _listed(folder))


def _listed(folder: Path) -> list[Path]:
    """Return what is in a folder; nothing where it is none, or another rank has just removed it."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _what_there_is(root: Path) -> str:
    names = [run.name for run in runs_in(root)][:ENDED_RUNS_KEPT]
    return f"Runs in {root}: {', '.join(names) or 'none'}"


def _remove_old(root: Path) -> None:
    """Remove runs that have ended, but for the latest; what is not ours to remove stays."""
    ended = (run for run in runs_in(root) if all(rank.has_ended for rank in ranks_of(run)))
    for run in list(ended)[ENDED_RUNS_KEPT:]:
        with suppress(OSError):
            for path in _files_of(run):
                path.unlink()
            run.rmdir()


def _files_of(run: Path) -> Iterator[Path]:
    for path in _listed(run):
        if _RANK_FILE.fullmatch(path.name.removeprefix(".memascend-").removesuffix(".new")):
            yield path
