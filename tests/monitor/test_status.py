"""A status goes through its JSON as it is, and what is no status is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memascend.errors import ConfigError
from memascend.ledger.traffic import ActivationTraffic
from memascend.monitor.status import FINISHED, VolumeRate, as_json, rates_between, read_status
from tests.support import statuses
from tests.support.statuses import ledger, status


def test_what_is_written_is_read(tmp_path: Path) -> None:
    made = status(ledger=ledger(activations=ActivationTraffic(3, 100, 90, 80, 70)))
    path = statuses.write(tmp_path, made) / "rank-0.json"
    read = read_status(path)
    assert json.loads(as_json(read)) == json.loads(as_json(made))
    assert read.process == made.process
    assert read.ledger.describe() == made.ledger.describe()


def test_what_a_later_version_adds_is_left_out(tmp_path: Path) -> None:
    content = json.loads(as_json(status())) | {"colour": "green"}
    (tmp_path / "x").write_text(json.dumps(content))
    assert read_status(tmp_path / "x").step == 30


@pytest.mark.parametrize(
    ("change", "named"),
    [({"version": 2}, "version"), ({"step": "many"}, "step"), ({"ledger": {}}, "ledger.rows")],
)
def test_another_document_is_refused_with_the_place(
    tmp_path: Path, change: dict[str, object], named: str
) -> None:
    content = json.loads(as_json(status())) | change
    (tmp_path / "x").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"{tmp_path / 'x'} is not a status.*{named}"):
        read_status(tmp_path / "x")


def test_what_is_no_json_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "half").write_text('{"version": 1')
    with pytest.raises(ConfigError, match="the document: Invalid JSON"):
        read_status(tmp_path / "half")
    with pytest.raises(ConfigError, match="No such file"):
        read_status(tmp_path / "none")


def test_the_time_left_is_that_of_the_steps_left() -> None:
    assert status(step=490).seconds_left == pytest.approx(20.0)
    assert status(step=501).seconds_left == 0
    for unknown in ({"steps_total": None}, {"mean": None}, {"phase": FINISHED}):
        assert status(**unknown).seconds_left is None


def test_rates_are_those_of_the_time_between() -> None:
    (before,) = ledger().volumes
    after = type(before)(
        before.path, before.bytes_read + 500, before.bytes_written + 300, before.busy_s + 2.5,
        before.reads, before.writes, before.needed,
    )  # fmt: skip
    assert rates_between([before], [after], 5.0) == [VolumeRate("/mnt/ssd", 100, 60, 0.5)]
    assert rates_between([before], [after], 2.0)[0].busy == 1.0  # counted in other moments
