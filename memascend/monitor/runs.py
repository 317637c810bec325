"""The folders of this machine's runs; a run's folder has one file for each rank.

By default all runs of a user are in one folder in /tmp. It exists on every machine and, unlike
$XDG_RUNTIME_DIR, stays when the user logs out and the run continues.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from memascend.errors import ConfigError
from memascend.monitor.status import Status, read_status

#: Number of ended runs to keep; older ones are removed when a new run begins.
ENDED_RUNS_KEPT = 8

_RUN_NAME = re.compile(r"\d{8}T\d{6}\.\d{3}-\d+")
_RANK_FILE = re.compile(r"rank-\d+\.json")


@dataclass(frozen=True, slots=True)
class RankFile:
    """The status of one rank, or the reason why there is none."""

    path: Path
    status: Status | None  # None if it cannot be read
    is_alive: bool | None  # True if the rank's process runs; None if this machine cannot know
    problem: str = ""  # the reason why there is no status

    @property
    def has_ended(self) -> bool:
        """True if the rank is finished, or its process has ended."""
        return self.status is not None and (self.status.is_finished or self.is_alive is False)


def default_root() -> Path:
    """Return the folder of this user's runs; it may not exist."""
    return Path(f"/tmp/memascend-{os.geteuid()}")


def run_name(milliseconds: int, pid: int) -> str:
    """Return the name of a run, from the begin and the process of rank 0; names sort by time."""
    began = datetime.fromtimestamp(milliseconds / 1000, timezone.utc)
    return f"{began:%Y%m%dT%H%M%S}.{milliseconds % 1000:03d}-{pid}"


def rank_path(root: Path, run: str, rank: int) -> Path:
    """Return the file of one rank."""
    return root / run / f"rank-{rank}.json"


def make_run(root: Path, run: str, *, is_shared: bool) -> None:
    """Create the folder of a run, and remove old runs.

    A root that the user named may be shared: other users may read it. The default root in /tmp
    belongs to this user alone, since every user can write to /tmp.

    Raises:
        OSError: The folder cannot be created, or another user created it first.
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
    """Raise PermissionError for a folder in /tmp that another user may have prepared."""
    state = folder.lstat()
    is_own = stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid()
    if not is_own or state.st_mode & 0o022:
        raise PermissionError(f"{folder} is not a folder of this user alone")


def runs_in(root: Path) -> list[Path]:
    """Return the folders of runs, the latest first."""
    found = [path for path in _listed(root) if _RUN_NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: path.name, reverse=True)


def ranks_of(run: Path) -> list[RankFile]:
    """Return the file of each rank of a run, by rank; empty if the folder is not a run."""
    found = []
    for path in _listed(run):
        if not _RANK_FILE.fullmatch(path.name):
            continue
        try:
            status = read_status(path)
        except ConfigError as error:
            if path.exists():  # else the run was removed meanwhile
                found.append(RankFile(path, None, None, str(error)))
        else:
            found.append(RankFile(path, status, status.process.is_alive()))
    return sorted(found, key=lambda rank: int(rank.path.stem.partition("-")[2]))


def find_run(name: str | None, root: Path | None = None) -> Path:
    """Return the folder of a run: the latest with a running rank, else the latest, without a name.

    The name is that of a run; or the path of a run, of a folder of runs, or of one rank's file.

    Raises:
        ConfigError: No such run; the message names the places searched and the runs that exist. Or
            the folder of runs belongs to another user.
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
    names = [run.name for run in runs_in(root)][:ENDED_RUNS_KEPT]
    raise ConfigError(
        f"there is no run {name!r}: neither {root / name} nor {path.absolute()} is a folder with "
        f"rank-N.json in it. Runs in {root}: {', '.join(names) or 'none'}"
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
    for run in found:
        if any(rank.status is not None and not rank.has_ended for rank in ranks_of(run)):
            return run
    return found[0]


def _check_trusted(root: Path) -> None:
    try:
        check_own(root)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(
            f"cannot look for runs: {error}. likely cause: another user made it. Remove it, or "
            'name a folder in the block: "status": "/path"'
        ) from error


def _looks_like_run(folder: Path) -> bool:
    return any(_RANK_FILE.fullmatch(path.name) for path in _listed(folder))


def _listed(folder: Path) -> list[Path]:
    """Return the entries of a folder; empty if it is none, or another rank has just removed it."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _remove_old(root: Path) -> None:
    """Remove runs that have ended, but for the latest; files of other users stay."""
    ended = (run for run in runs_in(root) if all(rank.has_ended for rank in ranks_of(run)))
    for run in list(ended)[ENDED_RUNS_KEPT:]:
        with suppress(OSError):
            for path in _listed(run):
                if _RANK_FILE.fullmatch(path.name.removeprefix(".memascend-").removesuffix(".new")):
                    path.unlink()
            run.rmdir()
