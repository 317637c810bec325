"""Volumes from the configuration: shares and weights, and who is asked for weights."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

from memascend import _core
from memascend.config.block import MemAscendConfig, parse_block
from memascend.errors import ConfigError
from memascend.runtime import Runtime, StockParts
from memascend.volumes import prepare as volumes_module
from memascend.volumes.prepare import prepared, share_of_rank, volume_paths


def prepare(config: MemAscendConfig, fallback: str) -> list[_core.VolumeOptions]:
    with prepared(config, fallback) as volumes:
        return volumes


def block(*volumes: object) -> MemAscendConfig:
    return parse_block({"volumes": list(volumes)})


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The volumes that were measured, each time; they get 1, 2, 3..."""
    calls: list[list[str]] = []

    def fake(volumes, *, load, cache):
        calls.append([volume.path for volume in volumes])
        return [float(index + 1) for index in range(len(volumes))]

    monkeypatch.setattr(volumes_module, "measured_weights", fake)
    return calls


def test_a_block_without_volumes_uses_nvme_path(tmp_path, measured):
    [volume] = prepare(parse_block({}), str(tmp_path / "new"))
    assert volume.path == str(tmp_path / "new")
    assert volume_paths(parse_block({}), "/nvme") == ["/nvme"]
    assert measured == []


def test_missing_directories_are_made_for_their_owner_only(tmp_path, measured):
    old = os.umask(0)
    try:
        prepare(block(str(tmp_path / "one" / "deep"), str(tmp_path / "two")), "unused")
    finally:
        os.umask(old)
    for name in ("one", "one/deep", "two"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o700
    assert not Path("unused").exists()


def test_weights_that_are_stated_are_not_measured(tmp_path, measured, caplog):
    caplog.set_level(logging.INFO, logger="memascend")
    one, two = prepare(
        block(
            {"path": str(tmp_path / "a"), "weight": 2.5},
            {"path": str(tmp_path / "b"), "weight": 1, "capacity": "1GiB"},
        ),
        "unused",
    )
    assert (one.weight, two.weight, two.capacity_bytes) == (2.5, 1.0, 1 << 30)
    assert measured == []
    assert f"{one.path}=2.5, {two.path}=1, as stated" in caplog.text


def test_weights_that_are_not_stated_are_measured(tmp_path, measured):
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    opened = prepare(block(paths[0], {"path": paths[1], "capacity": "1GiB"}), "unused")
    assert measured == [paths]
    assert [volume.weight for volume in opened] == [1.0, 2.0]
    assert opened[1].capacity_bytes == 1 << 30


def test_one_volume_is_not_measured(tmp_path, measured):
    assert prepare(block(str(tmp_path)), "unused")[0].path == str(tmp_path)
    assert measured == []


def test_two_names_of_one_directory_are_refused(tmp_path, measured):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(ConfigError, match="are the same"):
        prepare(block(str(tmp_path / "a"), str(tmp_path / "b")), "unused")


def test_two_directories_on_one_drive_are_warned_of(tmp_path, measured, caplog):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    prepare(block(str(tmp_path / "a"), str(tmp_path / "b")), "unused")
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert f"{tmp_path / 'a'} and {tmp_path / 'b'} are on one file system" in warnings[0]


def test_every_volume_has_the_processors_near_its_drive(tmp_path, monkeypatch):
    near = {str(tmp_path / "a"): [0, 2], str(tmp_path / "b"): [1]}
    monkeypatch.setattr("memascend.volumes.prepare.processors_near", near.__getitem__)
    first, second = map(str, near)
    for config, fallback in ((parse_block({}), first), (block(first), "unused")):
        with prepared(config, fallback) as [volume]:
            assert volume.cpus == [0, 2]
    weighed = [{"path": path, "weight": 1} for path in near]
    with prepared(parse_block({"volumes": weighed}), "unused") as volumes:
        assert [volume.cpus for volume in volumes] == [[0, 2], [1]]
    assert second == volumes[1].path


def test_a_runtime_stripes_over_the_volumes_of_its_block(tmp_path):
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    runtime = Runtime(
        config=parse_block(
            {
                "allocator": {"huge_pages": "off", "page_lock": False},
                "direct_nvme": {"engine": "threads"},
                "volumes": [{"path": path, "weight": 1} for path in paths],
            }
        ),
        directory=str(tmp_path / "unused"),
        page_lock=False,
        stock=StockParts(),
    )
    assert runtime.store is not None
    source = torch.arange(1 << 20, dtype=torch.float32)
    target = torch.zeros_like(source)
    runtime.store.write(key="param.0", source=source).wait()
    runtime.store.read(key="param.0", target=target).wait()
    assert torch.equal(source, target)
    stats = runtime.store.core.volume_stats()
    assert [(volume.path, volume.used_bytes) for volume in stats] == [
        (path, 2 << 20) for path in paths
    ]
    assert not (tmp_path / "unused").exists()
    runtime.close()


def test_every_rank_has_the_directories_and_its_own_devices():
    volumes = block(
        "/dir", *({"path": f"/dev/r{index}", "raw": True} for index in range(3))
    ).volumes
    assert volumes is not None
    shares = [share_of_rank(volumes, rank=rank, rank_count=2) for rank in range(2)]
    assert [[volume.path for volume in share] for share in shares] == [
        ["/dir", "/dev/r0", "/dev/r2"],
        ["/dir", "/dev/r1"],
    ]


def test_a_rank_without_a_device_is_an_error():
    volumes = block({"path": "/dev/r0", "raw": True}).volumes
    assert volumes is not None
    assert share_of_rank(volumes, rank=0, rank_count=2) == list(volumes)
    with pytest.raises(ConfigError, match="1 raw devices for 2 ranks"):
        share_of_rank(volumes, rank=1, rank_count=2)
