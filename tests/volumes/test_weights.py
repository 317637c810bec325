"""Measured weights: what rates mean, what is remembered, and that a bad cache does no harm."""

from __future__ import annotations

import json
import logging
import os

import pytest

from memascend import _core
from memascend.base.units import MIB
from memascend.errors import StoreError
from memascend.volumes import weights as volume_weights
from memascend.volumes.speed import Load
from memascend.volumes.weights import CACHE_FILE, measured_weights, weights_of

LOAD = Load(chunk_bytes=1 << 20, queue_depth=4, engine="threads", span_bytes=16 * MIB)


class FakeBench:
    rates = (1e9, 3e9)
    opened = 0

    def __init__(self, volumes, load, advance):
        type(self).opened += 1

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def run(self, mode, seconds):
        assert mode == "mixed"
        return list(self.rates)


@pytest.fixture
def bench(monkeypatch):
    FakeBench.opened = 0
    monkeypatch.setattr(volume_weights, "Bench", FakeBench)
    return FakeBench


@pytest.fixture
def volumes(tmp_path, monkeypatch):
    """Two directories that pass for two drives."""
    monkeypatch.setattr(volume_weights, "identity", lambda path: path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    return [_core.VolumeOptions(str(tmp_path / name)) for name in ("a", "b")]


def test_the_slowest_has_one_and_those_about_alike_are_alike():
    assert weights_of([1e9, 2e9, 3.333e9]) == [1.0, 2.0, 3.33]
    assert weights_of([1e9, 1.2e9]) == [1.0, 1.0]
    assert weights_of([0.0, 1e9]) == [1.0, 1.0]
    assert weights_of([1.0, 1e9]) == [1.0, 1000.0]


def test_what_was_measured_is_remembered_and_said(tmp_path, volumes, bench, caplog):
    caplog.set_level(logging.INFO, logger="memascend")
    cache = tmp_path / "cache"
    assert measured_weights(volumes, load=LOAD, cache=cache) == [1.0, 3.0]
    assert measured_weights(volumes, load=LOAD, cache=cache) == [1.0, 3.0]
    assert bench.opened == 1
    first, second = (record.getMessage() for record in caplog.records)
    assert "measured now: 1.00 GB/s, 3.00 GB/s" in first
    assert "measured before" in second
    assert (cache / CACHE_FILE).stat().st_mode & 0o777 == 0o600
    assert cache.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in cache.iterdir()] == [CACHE_FILE]


@pytest.mark.parametrize("time_s", [0, 4_000_000_000])
def test_what_was_measured_is_remembered_whatever_the_clock_says(tmp_path, volumes, bench, time_s):
    cache = tmp_path / "cache"
    first = measured_weights(volumes, load=LOAD, cache=cache)
    for path in tmp_path.rglob("*"):
        os.utime(path, (time_s, time_s))
    assert measured_weights(volumes, load=LOAD, cache=cache) == first
    assert bench.opened == 1


def test_directories_on_one_drive_are_not_measured(tmp_path, volumes, bench, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="memascend")
    monkeypatch.setattr(volume_weights, "identity", lambda path: "one drive")
    assert measured_weights(volumes, load=LOAD, cache=tmp_path) == [1.0, 1.0]
    assert bench.opened == 0
    assert "all are on one drive" in caplog.text


def test_a_moment_of_other_work_does_not_count(tmp_path, volumes, bench, monkeypatch):
    rates = iter([[1e9, 3e9], [0.1e9, 3e9], [1e9, 3e9]])
    monkeypatch.setattr(bench, "run", lambda self, mode, seconds: next(rates))
    assert measured_weights(volumes, load=LOAD, cache=tmp_path) == [1.0, 3.0]


def test_another_load_is_measured_anew(tmp_path, volumes, bench):
    measured_weights(volumes, load=LOAD, cache=tmp_path)
    other = Load(chunk_bytes=1 << 20, queue_depth=8, engine="threads")
    measured_weights(volumes, load=other, cache=tmp_path)
    assert bench.opened == 2
    assert len(json.loads((tmp_path / CACHE_FILE).read_text())) == 2


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "[" * 5000, '{"KEY": [1]}', '{"KEY": [1, "2"]}', '{"KEY": [1, 0]}',
     '{"KEY": [1, NaN]}', '{"KEY": [1, 1' + "0" * 400 + "]}", '{"KEY": [1, 2], "KEY": [3, 4]}',
     '{"KEY": [1], "other": ' + "[" * 900 + "]" * 900 + "}",
     '{"KEY": [true, 2]}', '{"KEY": [1, 1e999]}', '{"KEY": null}'],
)  # fmt: skip
def test_a_damaged_cache_is_measured_over(tmp_path, volumes, bench, content):
    measured_weights(volumes, load=LOAD, cache=tmp_path)
    key = next(iter(json.loads((tmp_path / CACHE_FILE).read_text())))
    (tmp_path / CACHE_FILE).write_text(content.replace('"KEY"', json.dumps(key)))
    assert measured_weights(volumes, load=LOAD, cache=tmp_path) == [1.0, 3.0]
    assert bench.opened == 2
    assert json.loads((tmp_path / CACHE_FILE).read_text())[key] == [1.0, 3.0]


def test_a_cache_that_is_a_link_or_a_fifo_is_not_followed(tmp_path, volumes, bench):
    (tmp_path / "victim").write_text("{}")
    (tmp_path / CACHE_FILE).symlink_to("victim")
    measured_weights(volumes, load=LOAD, cache=tmp_path)
    assert (tmp_path / "victim").read_text() == "{}"
    (tmp_path / CACHE_FILE).unlink()
    os.mkfifo(tmp_path / CACHE_FILE)
    measured_weights(volumes, load=LOAD, cache=tmp_path)
    assert (tmp_path / CACHE_FILE).is_file()


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, volumes, bench):
    (tmp_path / "file").touch()
    assert measured_weights(volumes, load=LOAD, cache=tmp_path / "file") == [1.0, 3.0]


def test_a_drive_that_cannot_be_measured_makes_all_alike(tmp_path, volumes, monkeypatch, caplog):
    def broken(volumes, load, advance):
        raise StoreError(5, "broken")

    monkeypatch.setattr(volume_weights, "Bench", broken)
    assert measured_weights(volumes, load=LOAD, cache=tmp_path) == [1.0, 1.0]
    assert "not measured, so all get equal weights" in caplog.text
    assert not (tmp_path / CACHE_FILE).exists()
