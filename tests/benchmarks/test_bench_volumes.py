"""Equal drives: the requests that planned sizes keep in flight on each, counted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import bench_volumes
import equal_drives
import pytest
import torch

from memascend.base.units import MIB

SHARDS = 2


@pytest.fixture(params=[1, 8])
def paths(request: pytest.FixtureRequest) -> Iterator[equal_drives.Paths]:
    drives = request.param
    made = equal_drives.Paths(equal_drives.plan_for(drives), drives=drives, shards=SHARDS)
    yield made
    made.close()


def in_flight(paths: equal_drives.Paths, start: Callable[[], object]) -> list[int]:
    """Return how many reads each drive has been given when `start` returns; none ends before."""
    paths.store.wait_all()
    before = reads_of(paths)
    paths.faults.paused = True
    try:
        start()
    finally:
        paths.faults.paused = False
    paths.store.wait_all()
    return [after - other for after, other in zip(reads_of(paths), before, strict=True)]


def reads_of(paths: equal_drives.Paths) -> list[int]:
    return [volume.traffic["reads"]["count"] for volume in paths.store.core.volume_stats()]


def test_each_drive_has_as_many_reads_in_flight_as_one_alone(paths: equal_drives.Paths) -> None:
    drives = len(paths.store.core.volume_stats())
    chunk_numel = paths.staging.slot_bytes // 2

    def read_into_every_slot() -> None:
        for index in range(len(paths.staging)):
            key = paths.shards[index % SHARDS].key
            offset = index // SHARDS * paths.staging.slot_bytes % (32 * MIB)
            reading.append(paths.staging.start_read(key, offset, chunk_numel, torch.bfloat16))

    def read_tiles_beside_those_computed_and_written() -> None:
        numel = SHARDS * equal_drives.SHARD_NUMEL
        taken = [paths.tiles.take("other", 0, numel) for _ in range(1 + drives)]
        paths.optimizer.prefetch([equal_drives.SUB_GROUP])
        assert not paths.tiles.has_idle()
        for tile in taken:
            paths.tiles.retire(tile)

    reading = []  # kept: a slot without a reference is free
    assert in_flight(paths, read_into_every_slot) == [16] * drives
    for read in reading:
        paths.staging.free(read.staged)
    # Master weights and two moments, of 4 MiB each.
    assert in_flight(paths, read_tiles_beside_those_computed_and_written) == [6] * drives


def test_a_drive_takes_the_stated_time_for_as_many_requests_as_it_runs_at_a_time() -> None:
    made = equal_drives.Paths(equal_drives.plan_for(1), drives=1, shards=1)
    try:
        for width, turns in ((16, 1), (4, 4)):
            made.slow_down(30, width)
            taken = equal_drives.harness.measure(lambda: made.parameters.read_now(made.shards))
            assert taken.wall_s >= turns * 0.03  # 16 requests
            assert taken.wall_s < 16 * 0.03, "one after the other"
            made.parameters.drop_all()
    finally:
        made.close()


@pytest.mark.full
def test_it_runs_at_a_small_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal_drives, "PASSES", 1)
    options = "--equal 2 --milliseconds 1 --width 2 --shards 1 --rounds 1"
    bench_volumes.main([*options.split(), "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "volumes-equal.json").read_text())
    assert {row["contender"] for row in rows} == {
        *("one drive", "2 drives", "2 drives, sizes of one")
    }
    assert {row["case"] for row in rows} == set(equal_drives.RUNS)
    assert all(row["figures"]["MB/s"]["p50"] > 0 for row in rows)
