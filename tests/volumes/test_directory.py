"""Directories as volumes: made where they are missing, refused where they cannot be used."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from memascend import _core
from memascend.config.volumes import VolumeConfig
from memascend.errors import StoreError
from memascend.nvme.store import TensorStore
from memascend.volumes import directory
from memascend.volumes.directory import existing_volume, provide_directory, provide_volume
from tests.support.nvme_memory import BOUNCE_BYTES, PageMemory
from tests.support.seccomp import deny_openat2
from tests.support.store_programs import start


def provide(path: Path) -> _core.VolumeOptions:
    return provide_volume(VolumeConfig(path=str(path)))


def test_missing_directories_are_made_for_their_owner_only(tmp_path):
    old = os.umask(0)
    try:
        provide_directory(tmp_path / "a" / "b")
    finally:
        os.umask(old)
    for name in ("a", "a/b"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o700
    provide_directory(tmp_path / "a" / "b")


def test_a_directory_that_has_to_be_there_is_not_made(tmp_path):
    with pytest.raises(StoreError) as caught:
        existing_volume(VolumeConfig(path=str(tmp_path / "missing")))
    assert caught.value.errno == errno.ENOENT
    assert not (tmp_path / "missing").exists()


def test_a_directory_that_has_to_be_made_is_pointed_out(tmp_path, caplog):
    provide(tmp_path / "mistyped")
    assert f"the volume {tmp_path / 'mistyped'}" in caplog.text
    caplog.clear()
    provide(tmp_path / "mistyped")
    assert caplog.text == ""


def test_a_directory_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # root may write anywhere
    with pytest.raises(StoreError, match="cannot write in the volume") as caught:
        provide(tmp_path)
    assert caught.value.volume == str(tmp_path)
    assert "fix: name a directory" in str(caught.value)


def test_what_is_no_directory_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot use the volume"):
        provide(tmp_path / "file")
    with pytest.raises(StoreError, match="cannot make the volume"):
        provide(tmp_path / "file" / "below")
    (tmp_path / "dangling").symlink_to("nowhere")
    provide(tmp_path / "dangling")  # as mkdir -p of what it names
    assert (tmp_path / "nowhere").is_dir()


def opened(volume: _core.VolumeOptions) -> TensorStore:
    bounce = PageMemory(BOUNCE_BYTES).tensor
    return TensorStore(volumes=[volume], bounce=bounce, engine="threads")


@pytest.mark.parametrize("above", ["a", "a/b", "a/b/c"])
def test_a_link_that_took_a_folders_place_after_the_look_at_it_is_refused(
    tmp_path: Path, above: str
) -> None:
    volume = provide(tmp_path / "a" / "b" / "c")
    (tmp_path / "elsewhere" / "b" / "c").mkdir(parents=True)
    (tmp_path / above).rename(tmp_path / "moved")
    (tmp_path / above).symlink_to(tmp_path / "elsewhere" / above[2:])
    with pytest.raises(StoreError, match="symbolic link") as caught:
        opened(volume)
    assert caught.value.errno == errno.ELOOP


def test_a_link_that_the_user_named_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real" / "folder").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    opened(provide(tmp_path / "link" / "folder")).close()


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM])
def test_a_kernel_or_container_without_openat2_serves_and_refuses_a_link_all_the_same(
    tmp_path: Path, code: int
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    script = (
        deny_openat2(code)
        + """
open_store(directory / "real", "threads").close()
try:
    open_store(directory / "link", "threads")
except OSError as error:
    print(os.strerror(error.errno))
"""
    )
    with start(tmp_path, script) as program:
        output, errors = program.communicate(timeout=60)
    assert output == "Not a directory\n", errors


@pytest.mark.parametrize(("kind", "is_warned"), [("tmpfs", True), ("ext4", False)])
def test_a_folder_in_memory_is_warned_of(
    kind: str,
    is_warned: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(directory, "filesystem_of", lambda _: kind)
    provide(tmp_path)
    assert ("is in memory" in caplog.text) is is_warned
