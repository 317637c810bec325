"""Saving: wherever a process is killed, there is a complete checkpoint and `latest` names it."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from memascend.checkpoint import folder as saving_folder
from memascend.checkpoint.folder import SavingFolder, write_latest
from memascend.errors import CheckpointError
from memascend.system import locks
from memascend.system.files import write_durably
from tests.support.other_user import OTHER_UID, another_user, hold_lock, open_folder

REPOSITORY = Path(__file__).resolve().parents[2]
# Saves a folder of two files under a tag and kills itself at the n-th call into the system.
PROGRAM = """
import os, shutil, signal, sys
from memascend.checkpoint import folder as saving_folder
from memascend.system import files
folder, tag, text, kill_at, exchanges = sys.argv[1:]
left = int(kill_at)

def counted(function):
    def call(*arguments, **keywords):
        global left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return function(*arguments, **keywords)
    return call

for module, name in ((os, "fsync"), (os, "rename"), (os, "replace"), (os, "rmdir"),
                     (os, "unlink"), (os, "link"), (saving_folder, "_exchange")):
    setattr(module, name, counted(getattr(module, name)))
if exchanges == "no":
    saving_folder._exchange = lambda one, other: False
saving = saving_folder.SavingFolder(folder, tag)
saving.begin()
(saving.path / "offloaded_tensors").mkdir()
files.write_durably(saving.path / "a_states.pt", text)
files.write_durably(saving.path / "offloaded_tensors" / "b", text)
saving.publish()
saving_folder.write_latest(folder, tag)
print("done")
"""


def save(folder: Path, tag: str, text: str, kill_at: int = -1, exchanges: str = "yes") -> bool:
    """Whether the program came to its end."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), tag, text, str(kill_at), exchanges],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode == 0


def contents(folder: Path, tag: str) -> str:
    """What a complete checkpoint holds."""
    texts = {
        (folder / tag / "a_states.pt").read_text(),
        (folder / tag / "offloaded_tensors" / "b").read_text(),
    }
    (text,) = texts
    return text


@pytest.mark.parametrize("exchanges", ["yes", "no"])
@pytest.mark.parametrize("tag", ["other", "same"])
def test_a_save_killed_anywhere_leaves_a_complete_checkpoint(
    tmp_path: Path, tag: str, exchanges: str
) -> None:
    assert save(tmp_path, "same", "old")
    (tmp_path / "same" / "notes.txt").write_text("mine")
    for kill_at in range(100):
        is_done = save(tmp_path, tag, f"new {kill_at}", kill_at, exchanges)
        # The next save, or a load, begins with this.
        saving_folder.clean(tmp_path)
        latest = (tmp_path / "latest").read_text()
        text = contents(tmp_path, latest)
        assert text == "old" or text.startswith("new")
        assert (tmp_path / "same" / "notes.txt").read_text() == "mine"
        left = {path.name for path in tmp_path.iterdir()}
        new = {name for name in left if name.startswith(".memascend-latest.")}
        assert left - new <= {"same", "other", "latest"}
        assert len(new) <= 1  # the next save removes it
        if is_done:
            assert not new
            assert (latest, text) == (tag, f"new {kill_at}")
            break
    assert is_done
    assert kill_at > 5


def test_before_it_is_published_nothing_is_seen_under_the_tag(tmp_path: Path) -> None:
    saving = SavingFolder(str(tmp_path), "a")
    saving.begin()
    write_durably(saving.path / "x_states.pt", "x")
    assert not (tmp_path / "a").exists()
    saving.publish()
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "x_states.pt"]


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    assert save(tmp_path, "a", "old")
    saving = SavingFolder(str(tmp_path), "a")
    saving.begin()
    saving.abandon()
    assert contents(tmp_path, "a") == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"a", "latest"}


def test_the_working_folder_of_a_living_save_is_left_alone(tmp_path: Path) -> None:
    first = SavingFolder(str(tmp_path), "a")
    first.begin()
    SavingFolder(str(tmp_path), "b").begin()
    assert first.path.is_dir()
    second = SavingFolder(str(tmp_path), "a")
    with pytest.raises(CheckpointError, match="another run is saving"):
        second.begin()
    second.abandon()
    assert first.path.is_dir()
    first.abandon()


@pytest.mark.parametrize("call", ["mkdir", "open", "fstat", "flock"])
def test_a_save_that_is_told_to_end_while_it_begins_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The handler of a signal, as one that exits, runs when a call returns."""
    owner: Any = fcntl if call == "flock" else os
    original = getattr(owner, call)
    left = 0

    def interrupted(*arguments: Any, **keywords: Any) -> Any:
        nonlocal left
        result = original(*arguments, **keywords)
        left -= 1
        if left == -1:
            raise SystemExit
        return result

    monkeypatch.setattr(owner, call, interrupted)
    for times in range(100):
        left = times
        saving = SavingFolder(str(tmp_path), "a")
        try:
            saving.begin()
        except SystemExit:
            saving.abandon()
            assert list(tmp_path.iterdir()) == []
        else:
            break
    monkeypatch.undo()
    saving.abandon()
    assert 0 < times < 99


def test_the_lock_of_a_dead_process_binds_nobody(tmp_path: Path) -> None:
    program = PROGRAM.replace("saving.publish()", "os.kill(os.getpid(), signal.SIGKILL)")
    arguments = [str(tmp_path), "a", "text", "-1", "yes"]
    subprocess.run([sys.executable, "-c", program, *arguments], cwd=REPOSITORY, check=False)
    left = tmp_path / ".memascend-a.saving"
    assert (left / "a_states.pt").is_file()
    assert save(tmp_path, "a", "new")
    assert contents(tmp_path, "a") == "new"
    assert not left.exists()


def test_a_run_that_never_gives_the_folder_back_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving_folder, "_PATIENCE_S", 0.1)
    with (
        saving_folder._alone_in(tmp_path),
        pytest.raises(CheckpointError, match="another run that saves there is stopped"),
    ):
        SavingFolder(str(tmp_path), "a").begin()


def test_a_child_forked_meanwhile_does_not_keep_the_folder_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving_folder, "_PATIENCE_S", 0.1)
    duplicate = -1
    flock = locks.fcntl.flock

    def forked(descriptor: int, operation: int) -> None:
        nonlocal duplicate
        flock(descriptor, operation)
        if duplicate < 0:
            duplicate = os.dup(descriptor)  # what a child would have

    monkeypatch.setattr(locks.fcntl, "flock", forked)
    with saving_folder._alone_in(tmp_path):
        pass
    assert save(tmp_path, "a", "new")
    os.close(duplicate)


def test_a_save_waits_until_the_one_before_has_given_its_lock_back(tmp_path: Path) -> None:
    first, second = (SavingFolder(str(tmp_path), "a") for _ in range(2))
    first.begin()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first, "_unlock", lambda: None)
        first.publish()
    (late := threading.Timer(0.1, first._unlock)).start()
    second.begin()
    late.join()
    saving_folder.clean(tmp_path)
    assert second.path.is_dir()  # nobody took it for a killed save's
    second.abandon()


def test_two_runs_that_save_the_same_tag_all_the_time_never_mix(tmp_path: Path) -> None:
    """Each save is whole or refused; what is there in the end is one run's."""
    head, body = PROGRAM.split("saving = saving_folder")
    body = textwrap.indent(f"saving = saving_folder{body}", "    ")
    program = f"{head}\ndef once():\n{body}\n" + textwrap.dedent(
        """
        import time
        done = 0
        while done < 30:
            try:
                once()
                done += 1
            except saving_folder.CheckpointError as error:
                assert "another run is saving there" in str(error), error
                time.sleep(0.001)
        """
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), "a", text, "-1", "yes"],
            cwd=REPOSITORY,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for text in ("one", "other")
    ]
    for run in runs:
        _, errors = run.communicate(timeout=60)
        assert run.returncode == 0, errors
    assert contents(tmp_path, "a") in ("one", "other")
    assert not list(tmp_path.glob(".memascend*"))


@pytest.mark.parametrize("time_s", [0, 4_000_000_000])
def test_the_times_of_files_decide_nothing(tmp_path: Path, time_s: int) -> None:
    """A clock that was set back makes an old checkpoint newer than a new one."""
    assert save(tmp_path, "a", "old")
    (tmp_path / ".memascend-a.saving").mkdir()  # of a killed save
    for path in tmp_path.rglob("*"):
        os.utime(path, (time_s, time_s))
    assert save(tmp_path, "a", "new")
    assert contents(tmp_path, (tmp_path / "latest").read_text()) == "new"
    assert not list(tmp_path.glob(".memascend*"))


def test_files_of_the_checkpoint_that_is_replaced_do_not_stay(tmp_path: Path) -> None:
    stale = tmp_path / "a" / "offloaded_tensors" / "rank01"
    stale.mkdir(parents=True)
    (tmp_path / "a" / "zero_pp_rank_1_mp_rank_00_model_states.pt").touch()
    (tmp_path / "a" / "mine").mkdir()
    (tmp_path / "a" / "mine" / "file").write_text("kept")
    assert save(tmp_path, "a", "new")
    names = {str(path.relative_to(tmp_path / "a")) for path in (tmp_path / "a").rglob("*")}
    assert names == {"a_states.pt", "offloaded_tensors", "offloaded_tensors/b", "mine", "mine/file"}


def test_a_tag_may_have_a_folder_of_its_own(tmp_path: Path) -> None:
    saving = SavingFolder(str(tmp_path), "x/y")
    saving.begin()
    assert saving.path == tmp_path / saving.tag
    saving.publish()
    assert (tmp_path / "x" / "y").is_dir()


@pytest.mark.parametrize("tag", ["", "..", "../a", "/a", "a/../../b"])
def test_a_tag_that_leads_elsewhere_is_refused(tmp_path: Path, tag: str) -> None:
    with pytest.raises(CheckpointError, match="leads out of save_dir"):
        SavingFolder(str(tmp_path), tag)


def test_latest_changes_in_one_step(tmp_path: Path) -> None:
    for tag in ("one", "two"):
        write_latest(str(tmp_path), tag)
        assert (tmp_path / "latest").read_text() == tag
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


def test_a_lock_file_that_is_not_ours_is_named_and_done_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "victim").write_text("mine")
    planted = tmp_path / f".memascend-saves.lock-{os.geteuid()}"
    planted.symlink_to("victim")
    saving = SavingFolder(str(tmp_path), "a")
    saving.begin()
    saving.publish()
    assert str(planted) in caplog.text
    assert (tmp_path / "a").is_dir()
    assert (tmp_path / "victim").read_text() == "mine"


def test_where_locks_do_not_work_nothing_is_left_and_nothing_taken_for_a_killed_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    saving, other = (SavingFolder(str(tmp_path), tag) for tag in ("a", "b"))
    saving.begin()
    other.begin()
    assert saving.path.is_dir()
    saving.publish()
    other.abandon()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert caplog.text == ""


# -- another user of the machine -------------------------------------------------------------------


def hold_all_locks(folder: Path) -> dict[str, bool]:
    """The locks that another user gets, of the folder and of all in it that he may open."""
    held = {}
    for path in (folder, *folder.rglob("*")):
        with suppress(PermissionError):
            held[path.name] = hold_lock(path)
    return held


@pytest.mark.root
def test_another_user_who_may_read_cannot_hold_a_save_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving_folder, "_PATIENCE_S", 0.1)
    with open_folder() as folder:
        (folder / "a").mkdir()
        with another_user(lambda: hold_all_locks(folder)) as held:
            assert held == {folder.name: True, "a": True}
            saving = SavingFolder(str(folder), "a")
            saving.begin()
            saving.publish()
            write_latest(str(folder), "a")


@pytest.mark.root
def test_another_user_cannot_keep_a_killed_save_from_being_removed() -> None:
    with open_folder() as folder:
        assert not save(folder, "a", "killed", kill_at=2)
        with another_user(lambda: hold_all_locks(folder)) as held:
            assert held[".memascend-a.saving"]
            assert save(folder, "a", "new")
        assert {path.name for path in folder.iterdir()} == {"a", "latest"}


@pytest.mark.root
def test_the_lock_of_a_living_save_cannot_be_opened_by_another_user() -> None:
    with open_folder() as folder:
        saving = SavingFolder(str(folder), "a")
        with saving_folder._alone_in(folder):
            (file,) = folder.iterdir()
            with another_user(lambda: hold_lock(file)) as refused:
                assert isinstance(refused, PermissionError)
        saving.begin()
        (file,) = folder.glob("*.lock-*")
        with another_user(lambda: hold_lock(file)) as refused:
            assert isinstance(refused, PermissionError)
        saving.abandon()


@pytest.mark.root
def test_what_another_user_is_saving_is_left_alone() -> None:
    with open_folder(mode=0o777) as folder:
        theirs = folder / ".memascend-a.saving"
        theirs.mkdir()
        os.chown(theirs, OTHER_UID, OTHER_UID)
        # Of a save of ours that was killed after it was published.
        (folder / f".memascend-a.saving.lock-{os.geteuid()}").touch()
        assert save(folder, "b", "new")
        with pytest.raises(CheckpointError, match="exists"):
            SavingFolder(str(folder), "a").begin()
        assert theirs.is_dir()
        assert {path.name for path in folder.iterdir()} == {theirs.name, "b", "latest"}


@pytest.mark.root
def test_what_only_another_user_can_put_back_ends_no_save() -> None:
    with open_folder(mode=0o1777) as folder:
        (folder / ".memascend-b.replaced").mkdir()

        def save_another() -> None:
            saving = SavingFolder(str(folder), "a")
            saving.begin()
            saving.publish()

        with another_user(save_another) as error:
            assert error is None
        assert {path.name for path in folder.iterdir()} == {"a", ".memascend-b.replaced"}


@pytest.mark.root
def test_a_link_that_another_user_planted_is_not_followed() -> None:
    with open_folder(mode=0o1777) as folder, open_folder() as own:
        (own / "victim").write_text("mine")

        def plant() -> None:
            for name in ("latest", ".memascend-latest", ".memascend-b.saving"):
                (folder / name).symlink_to(own / "victim")
            (folder / ".memascend-c.replaced").symlink_to(own)

        with another_user(plant) as planted:
            assert planted is None
        assert save(folder, "a", "new")
        with pytest.raises(CheckpointError, match="exists"):
            SavingFolder(str(folder), "b").begin()
        assert (folder / "latest").read_text() == "a"
        assert not (folder / "latest").is_symlink()
        assert not (folder / "c").exists()
        assert (own / "victim").read_text() == "mine"


def test_a_rank_that_does_not_see_the_working_folder_is_told_so(tmp_path: Path) -> None:
    """Its machine has another file system there, and its files would be missing."""
    leader = SavingFolder(str(tmp_path / "here"), "a")
    other = SavingFolder(str(tmp_path / "elsewhere"), "a")
    leader.begin()
    leader.check_is_shared()
    with pytest.raises(CheckpointError, match=r"this rank does not see .*use_node_local_storage"):
        other.check_is_shared()
    leader.abandon()
