"""The traffic of volumes: the ledger's lines, and that a store's figures are taken over."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from memascend.base.units import GIB, MIB
from memascend.ledger.ledger import Ledger
from memascend.ledger.traffic import Latency, VolumeTraffic, traffic_of
from tests.support.nvme_memory import open_store, read, write

LATENCY = Latency(count=1000, p50_s=0.0004, p99_s=0.00215, p999_s=0.01, longest_s=0.031)
NONE = Latency(count=0, p50_s=0.0, p99_s=0.0, p999_s=0.0, longest_s=0.0)
VOLUME = VolumeTraffic(
    path="/mnt/nvme0",
    bytes_read=3 * GIB,
    bytes_written=512 * MIB,
    busy_s=8.14,
    reads=LATENCY,
    writes=replace(LATENCY, p99_s=0.5),
    needed=LATENCY,
)


def test_a_line_says_how_busy_a_volume_was_and_how_long_requests_took() -> None:
    assert VOLUME.describe() == (
        "/mnt/nvme0: busy for 8.1 s; read 3.00 GiB (99 % within 2.15 ms, longest 31 ms); "
        "written 512.00 MiB (99 % within 500 ms, longest 31 ms)"
    )


def test_what_was_never_done_is_left_out() -> None:
    idle = replace(VOLUME, reads=NONE, writes=NONE, busy_s=0.0)
    assert idle.describe() == "/mnt/nvme0: busy for 0.0 s"


def test_the_ledger_has_a_line_for_each_volume_and_what_was_waited(tmp_path: Path) -> None:
    volumes = [VOLUME, replace(VOLUME, path="/mnt/nvme1")]
    ledger = Ledger((), None, 0, 0, 0, 0, {"wait_seconds": 2.25}, volumes=volumes)
    *_, first, second, waited = ledger.describe().splitlines()
    assert first == f"  {VOLUME.describe()}"
    assert "/mnt/nvme1" in second
    assert "waited 2.2 s" in waited
    ledger.write(tmp_path / "report.json")
    found = json.loads((tmp_path / "report.json").read_text())["volumes"]
    assert [volume["path"] for volume in found] == ["/mnt/nvme0", "/mnt/nvme1"]
    assert found[0]["needed"]["p999_s"] == 0.01


def test_a_stores_own_figures_are_taken_over(tmp_path: Path) -> None:
    store = open_store(tmp_path, "auto")
    for _ in range(8):
        write(store, "k", bytes(64 << 10)).wait()
    read(store, "k", 4096)
    [volume] = traffic_of(store)
    store.close()
    assert volume.path == str(tmp_path)
    assert (volume.bytes_read, volume.bytes_written) == (4096, 8 * 64 << 10)
    assert (volume.reads.count, volume.writes.count) == (1, 8)
    assert 0 < volume.reads.p50_s <= volume.reads.longest_s <= volume.busy_s
