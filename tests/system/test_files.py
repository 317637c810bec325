"""Files are made anew, appear whole, and a link in their place is never followed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from memascend.system import files
from memascend.system.files import (
    open_anew,
    open_new,
    replace_durably,
    replace_whole,
    sync,
    write_durably,
)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    old = os.umask(mask)
    try:
        yield
    finally:
        os.umask(old)


def write_new(path: Path) -> None:
    os.close(open_new(path))


def write_anew(path: Path) -> None:
    with open(open_anew(path), "w") as file:
        file.write("new")


def write_durably_there(path: Path) -> None:
    write_durably(path, "new")


def replace(path: Path) -> None:
    replace_durably(path, "new")


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("write", [write_new, write_durably_there])
def test_what_is_there_is_not_written_over(
    tmp_path: Path, write: Callable[[Path], None], link: Callable[[Path, Path], None]
) -> None:
    (tmp_path / "victim").write_text("mine")
    link(tmp_path / "victim", tmp_path / "file")
    with pytest.raises(FileExistsError):
        write(tmp_path / "file")
    assert (tmp_path / "victim").read_text() == "mine"


def test_a_link_to_nowhere_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "file").symlink_to("elsewhere")
    with pytest.raises(FileExistsError):
        open_new(tmp_path / "file")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("write", [write_anew, replace])
def test_a_link_is_replaced_and_what_it_names_is_not(
    tmp_path: Path, write: Callable[[Path], None], link: Callable[[Path, Path], None]
) -> None:
    (tmp_path / "victim").write_text("mine")
    link(tmp_path / "victim", tmp_path / "file")
    write(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "new"
    assert not (tmp_path / "file").is_symlink()
    assert (tmp_path / "victim").read_text() == "mine"


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_a_file_has_the_mode_that_the_umask_gives(tmp_path: Path, mask: int, mode: int) -> None:
    with umask(mask):
        for write in (write_new, write_anew, write_durably_there, replace):
            path = tmp_path / write.__name__
            write(path)
            assert path.stat().st_mode & 0o777 == mode
        replace_durably(tmp_path / "own", "", mode=0o600)
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_replaced_was_written_under_a_name_that_nobody_foresees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []

    def note(source: Path, place: Path) -> None:
        names.append(source.name)
        plain_replace(source, place)

    plain_replace = os.replace
    monkeypatch.setattr(files.os, "replace", note)
    for _ in range(2):
        replace(tmp_path / "file")
    assert len(set(names)) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_a_killed_process_left_is_removed_and_other_files_are_not(tmp_path: Path) -> None:
    (tmp_path / ".memascend-file.0123.new").touch()
    others = {".memascend-file2.0123.new", ".memascend-file", "notes.new"}
    for name in others:
        (tmp_path / name).touch()
    replace(tmp_path / "file")
    assert {path.name for path in tmp_path.iterdir()} == {"file", *others}


def test_what_cannot_be_put_in_place_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.EIO, "no")

    replace_durably(tmp_path / "file", "old")
    monkeypatch.setattr(files.os, "fsync", refuse)
    with pytest.raises(OSError, match="no"):
        replace(tmp_path / "file")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_file_system_without_fsync_of_folders_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.EINVAL, "no")

    monkeypatch.setattr(os, "fsync", refuse)
    sync(tmp_path)


def test_a_file_that_is_replaced_again_and_again_is_whole_at_any_moment(tmp_path: Path) -> None:
    path = tmp_path / "status"
    replace_whole(path, "first")
    before = path.open(encoding="utf-8")
    replace_whole(path, "second")
    with before:
        assert before.read() == "first"
    assert path.read_text(encoding="utf-8") == "second"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_replaced_stays_with_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "status"
    replace_whole(path, "first")

    def refuse(*_: object) -> None:
        raise OSError(28, "full")

    monkeypatch.setattr(files.os, "replace", refuse)
    with pytest.raises(OSError, match="full"):
        replace_whole(path, "second")
    assert path.read_text(encoding="utf-8") == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_left_or_another_planted_is_not_written_through(
    tmp_path: Path,
) -> None:
    path, other = tmp_path / "status", tmp_path / "other"
    other.write_text("mine")
    (tmp_path / ".memascend-status.new").symlink_to(other)
    replace_whole(path, "new")
    assert other.read_text() == "mine"
    assert path.read_text() == "new"
