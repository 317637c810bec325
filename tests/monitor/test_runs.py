"""Runs are found where they lie, newest first; what is not one is said, with what there is."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from memascend.errors import ConfigError
from memascend.monitor import runs
from memascend.monitor.runs import (
    ENDED_RUNS_KEPT,
    default_root,
    find_run,
    make_run,
    ranks_of,
    run_name,
    runs_in,
)
from memascend.monitor.status import FINISHED
from tests.support import statuses
from tests.support.statuses import RUN, status


def named(number: int) -> str:
    return run_name(1_767_323_045_678 + 1000 * number, 42)


def dead() -> object:
    """The process of a run that was killed."""
    return replace(status().process, started=1)


def test_names_of_runs_are_in_the_order_in_which_they_began() -> None:
    assert named(0) == RUN
    assert sorted([named(2), named(0), named(1)]) == [named(0), named(1), named(2)]


# -- finding -------------------------------------------------------------------------------------


def test_the_latest_that_runs_is_found_else_the_latest(tmp_path: Path) -> None:
    statuses.write(tmp_path, status(run=named(3), phase=FINISHED))
    statuses.write(tmp_path, status(run=named(2), process=dead()))
    assert find_run(None, tmp_path).name == named(3)
    statuses.write(tmp_path, status(run=named(1)))
    statuses.write(tmp_path, status(run=named(0)))
    (tmp_path / named(4)).mkdir()  # nothing in it yet
    assert find_run(None, tmp_path).name == named(1)


def test_a_run_that_cannot_be_read_is_not_taken_for_one_that_runs(tmp_path: Path) -> None:
    statuses.write(tmp_path, status(run=named(1), phase=FINISHED))
    (statuses.write(tmp_path, status(run=named(0))) / "rank-0.json").write_text("")  # a power cut
    assert find_run(None, tmp_path).name == named(1)


def test_a_run_is_found_by_name_by_path_by_folder_of_runs_and_by_a_file_of_it(
    tmp_path: Path,
) -> None:
    folder = statuses.write(tmp_path, status(), status(rank=1))
    root = tmp_path / "elsewhere"
    for name in (folder, tmp_path, folder / "rank-1.json"):
        assert find_run(str(name), root) == folder
    assert find_run(RUN, tmp_path) == folder


def test_what_is_no_run_is_said_with_what_there_is(tmp_path: Path) -> None:
    folder = statuses.write(tmp_path, status())
    with pytest.raises(ConfigError) as caught:
        find_run("20260102", tmp_path)
    for text in ("'20260102'", str(tmp_path / "20260102"), f"Runs in {tmp_path}: {folder.name}"):
        assert text in str(caught.value)


def test_where_there_is_none_it_is_said_where_one_would_be(tmp_path: Path) -> None:
    for name, root in ((None, tmp_path / "none"), (str(tmp_path), None)):
        with pytest.raises(ConfigError, match=f"no run was found: {tmp_path}.*memascend.status"):
            find_run(name, root)


def test_a_folder_in_tmp_that_somebody_else_may_have_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    theirs.chmod(0o777)
    monkeypatch.setattr(runs, "default_root", lambda: theirs)
    with pytest.raises(ConfigError, match=f"{theirs} is not a folder of this user alone"):
        find_run(None)
    theirs.rmdir()
    with pytest.raises(ConfigError, match="no run was found"):
        find_run(None)


def test_the_default_folder_is_this_users() -> None:
    assert default_root() == Path(f"/tmp/memascend-{os.geteuid()}")


# -- ranks ---------------------------------------------------------------------------------------


def test_ranks_are_in_order_with_what_became_of_them(tmp_path: Path) -> None:
    elsewhere = replace(status().process, host="another")
    folder = statuses.write(
        tmp_path,
        status(rank=10, phase=FINISHED),
        status(rank=2, process=dead()),
        status(rank=3, process=elsewhere),
        status(rank=0),
    )
    (folder / "rank-1.json").write_text("{}")
    (folder / ".memascend-rank-0.json.new").write_text("{")
    found = ranks_of(folder)
    assert [rank.path.name for rank in found] == [f"rank-{n}.json" for n in (0, 1, 2, 3, 10)]
    assert [rank.is_alive for rank in found] == [True, None, False, None, True]
    assert [rank.has_ended for rank in found] == [False, False, True, False, True]
    assert "is not a status" in found[1].problem


def test_a_run_that_another_rank_removes_meanwhile_has_no_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "is_dir", lambda path: True)  # and is gone a moment later
    assert ranks_of(tmp_path / RUN) == []


# -- making --------------------------------------------------------------------------------------


def test_a_folder_in_tmp_is_for_its_owner_alone(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for _ in range(2):  # every rank makes it
        make_run(root, RUN, is_shared=False)
    assert root.stat().st_mode & 0o777 == 0o700
    root.chmod(0o770)
    with pytest.raises(PermissionError, match="not a folder of this user alone"):
        make_run(root, RUN, is_shared=False)
    link = tmp_path / "link"
    link.symlink_to(root)
    with pytest.raises(PermissionError):
        make_run(link, RUN, is_shared=False)


def test_a_folder_that_the_user_named_is_made_with_those_above_it(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    make_run(root, RUN, is_shared=True)
    assert (root / RUN).is_dir()


def test_runs_that_have_ended_go_but_for_the_latest(tmp_path: Path) -> None:
    for number in range(ENDED_RUNS_KEPT + 4):
        ended = {"phase": FINISHED} if number % 2 else {"process": dead()}
        statuses.write(tmp_path, status(run=named(number), **({} if number == 1 else ended)))
    kept = tmp_path / named(2) / "notes.txt"
    kept.write_text("somebody's")
    make_run(tmp_path, named(100), is_shared=True)
    left = {run.name for run in runs_in(tmp_path)}
    latest = {named(number) for number in range(4, ENDED_RUNS_KEPT + 4)}
    assert left == latest | {named(1), named(2), named(100)}
    assert not re.search("rank", " ".join(path.name for path in kept.parent.iterdir()))
