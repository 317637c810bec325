"""Manifests: what they say comes back, and what they must not say is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from memascend.checkpoint.manifest import (
    ENTRY_COUNT_MAX,
    PADDING_BYTES_MAX,
    VERSION,
    FileEntry,
    Manifest,
    check_file,
    manifest_name,
    read_manifest,
)
from memascend.errors import CheckpointError
from tests.support.manifest_content import manifest_content

#: As the first version wrote it, to the byte.
VERSION_1 = """{
 "format": "memascend checkpoint",
 "version": 1,
 "memascend": "0.1.0",
 "rank": 3,
 "world": 4,
 "global_step": 7,
 "optimizer": "DeepSpeedCPUAdam",
 "optimizer_step": 6,
 "sub_groups": [
  {
   "name": "0_4",
   "numel": 100
  }
 ],
 "tensors": [
  {
   "sub_group": 0,
   "state": null,
   "dtype": "float32",
   "numel": 100,
   "file": "offloaded_tensors/rank03/0_4.tensor.swp"
  }
 ],
 "files": [
  {
   "name": "offloaded_tensors/rank03/0_4.tensor.swp",
   "nbytes": 1024,
   "crc32": "00c0ffee"
  }
 ]
}
"""
TENSOR = "offloaded_tensors/rank00/0_4.tensor.swp"


def content() -> dict[str, Any]:
    return manifest_content(
        [{"state": None, "dtype": "float32", "file": TENSOR}],
        [{"name": TENSOR, "nbytes": 1024, "crc32": "00c0ffee"}],
    )


def write(folder: Path, changed: dict[str, Any], rank: int = 0) -> Path:
    path = folder / manifest_name(rank)
    path.write_text(json.dumps(changed))
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    manifest = Manifest.model_validate(content())
    (tmp_path / manifest_name(0)).write_text(manifest.text())
    assert read_manifest(tmp_path, 0) == manifest


def test_powers_of_the_betas_come_back_to_the_last_bit(tmp_path: Path) -> None:
    beta = struct.unpack("f", struct.pack("f", 0.9))[0]
    powers = {"beta1": beta, "beta2": 0.999, "since": 3, "step": 6}
    manifest = Manifest.model_validate(content() | {"powers": powers})
    (tmp_path / manifest_name(0)).write_text(manifest.text())
    read = read_manifest(tmp_path, 0)
    assert read is not None
    assert read.powers is not None
    assert read.powers.model_dump() == powers


@pytest.mark.parametrize(
    "change", [{"since": 7}, {"beta1": 1.5}, {"beta2": "0.9x"}, {"step": -1}, {"power": 0.5}]
)
def test_powers_that_no_run_can_have_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    powers = {"beta1": 0.9, "beta2": 0.999, "since": 3, "step": 6} | change
    write(tmp_path, content() | {"powers": powers})
    with pytest.raises(CheckpointError, match=r"cannot be used: .*powers"):
        read_manifest(tmp_path, 0)


def test_the_format_of_checkpoints_that_exist_is_still_read_and_written(tmp_path: Path) -> None:
    (tmp_path / "memascend-rank03.json").write_text(VERSION_1)
    manifest = read_manifest(tmp_path, 3)
    assert manifest is not None
    assert manifest.text() == VERSION_1
    assert (manifest.world, manifest.global_step, manifest.optimizer_step) == (4, 7, 6)
    assert [entry.numel for entry in manifest.sub_groups] == [100]
    assert [(tensor.sub_group, tensor.state) for tensor in manifest.tensors] == [(0, None)]


def test_a_folder_without_any_manifest_is_stocks(tmp_path: Path) -> None:
    assert read_manifest(tmp_path, 0) is None


def test_a_manifest_that_is_missing_among_others_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, content())
    with pytest.raises(CheckpointError, match=r"no memascend-rank01\.json.*not copied completely"):
        read_manifest(tmp_path, 1)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../other/file", "a/../../b", "", "..", "a\\b", "a\0b"]
)
def test_names_that_lead_out_of_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    changed = content()
    changed["files"].append({"name": name, "nbytes": 1, "crc32": "00000000"})
    write(tmp_path, changed)
    with pytest.raises(CheckpointError, match="leads out of the checkpoint's folder"):
        read_manifest(tmp_path, 0)


@pytest.mark.parametrize(
    ("place", "value", "what"),
    [
        (("files", 0, "nbytes"), -1, r"files\.0\.nbytes"),
        (("files", 0, "nbytes"), "many", r"files\.0\.nbytes"),
        (("files", 0, "nbytes"), 396, "has 396 bytes, the optimizer needs 400"),
        (("files", 0, "nbytes"), 400 + PADDING_BYTES_MAX, "the optimizer needs 400"),
        (("files", 0, "crc32"), "xyz", r"files\.0\.crc32"),
        (("tensors", 0, "dtype"), "object", r"tensors\.0\.dtype"),
        (("tensors", 0, "sub_group"), 1, "no such"),
        (("tensors", 0, "file"), "other", "not listed in files"),
        (("tensors", 0, "numel"), 99, "not as many elements"),
        (("rank",), 3, "for rank 3, expected 0"),
        (("world",), None, "world"),
        (("format",), "other", "format"),
        (("surprise",), 1, "surprise"),
        (("version",), VERSION + 1, "later memascend"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    tmp_path: Path, place: tuple[Any, ...], value: Any, what: str
) -> None:
    changed = content()
    target: Any = changed
    for step in place[:-1]:
        target = target[step]
    target[place[-1]] = value
    write(tmp_path, changed)
    with pytest.raises(CheckpointError, match=what):
        read_manifest(tmp_path, 0)


@pytest.mark.parametrize("part", ["files", "tensors"])
def test_what_is_named_twice_is_refused(tmp_path: Path, part: str) -> None:
    changed = content()
    changed[part] *= 2
    write(tmp_path, changed)
    with pytest.raises(CheckpointError, match=r"twice|second file"):
        read_manifest(tmp_path, 0)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"text"', "{}", '{"version": "x"}'])
def test_what_is_no_manifest_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / manifest_name(0)
    path.write_text(text)
    with pytest.raises(CheckpointError, match=path.name):
        read_manifest(tmp_path, 0)


def test_a_damaged_file_is_named_with_what_is_expected_and_found(tmp_path: Path) -> None:
    entry = FileEntry(name="a", nbytes=4, crc32="00000001")
    check_file(tmp_path, entry, 4, 1)
    for nbytes, crc32 in ((3, 1), (4, 2)):
        with pytest.raises(CheckpointError) as raised:
            check_file(tmp_path, entry, nbytes, crc32)
        text = str(raised.value)
        assert str(tmp_path / "a") in text
        assert "expected 4 bytes with crc32 00000001" in text
        assert f"found {nbytes} bytes with crc32 {crc32:08x}" in text
        assert "Copy it again" in text


def test_a_name_that_passes_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "tag"
    (folder / "inside").mkdir(parents=True)
    (folder / "out").symlink_to(tmp_path)
    (folder / "in").symlink_to("inside")
    (folder / "loop").symlink_to("loop")
    for name, is_refused in (("out/secret", True), ("out", True), ("in/file", False)):
        changed = content()
        changed["tensors"] = []
        changed["files"] = [{"name": name, "nbytes": 1, "crc32": "00c0ffee"}]
        write(folder, changed)
        if is_refused:
            with pytest.raises(CheckpointError, match=f'"{name}" leads out of the'):
                read_manifest(folder, 0)
        else:
            assert read_manifest(folder, 0) is not None


@pytest.mark.parametrize(
    "name", ["a" * 300, "a/" * 600 + "b", "\ud800"], ids=["part", "whole", "no text"]
)
def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path, name: str) -> None:
    changed = content()
    changed["files"][0]["name"] = changed["tensors"][0]["file"] = name
    write(tmp_path, changed)
    with pytest.raises(CheckpointError, match="cannot be used") as caught:
        read_manifest(tmp_path, 0)
    assert len(str(caught.value)) < 1000


def test_a_text_too_long_for_a_message_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {**content(), "optimizer": "Adam" * 1_000_000})
    with pytest.raises(CheckpointError, match="optimizer") as caught:
        read_manifest(tmp_path, 0)
    assert len(str(caught.value)) < 1000


def test_a_manifest_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / manifest_name(0)).write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="nested too deeply"):
        read_manifest(tmp_path, 0)


def test_wrong_entries_by_the_million_are_not_told_of_one_by_one(tmp_path: Path) -> None:
    write(tmp_path, {**content(), "files": [0] * (ENTRY_COUNT_MAX + 1)})
    with pytest.raises(CheckpointError, match=r"files has .* entries"):
        read_manifest(tmp_path, 0)


def test_a_size_beyond_any_file_is_refused(tmp_path: Path) -> None:
    changed = content()
    changed["sub_groups"][0]["numel"] = changed["tensors"][0]["numel"] = 1 << 62
    changed["files"][0]["nbytes"] = 1 << 64
    write(tmp_path, changed)
    with pytest.raises(CheckpointError, match="nbytes"):
        read_manifest(tmp_path, 0)
