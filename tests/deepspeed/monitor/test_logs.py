"""A step is in the logs that the user keeps, and in no others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("deepspeed")
from memascend.deepspeed.attach import attachment as attaching
from memascend.deepspeed.monitor import logs as module
from memascend.monitor.status_file import Progress, RankPlace, StatusFile
from tests.support.statuses import RUN, ledger

pytestmark = pytest.mark.deepspeed


class Attachment:
    """What a line asks of one."""

    def __init__(self, status: StatusFile | None) -> None:
        self.status = status


class Base:
    """The Trainer's base of callbacks."""


class Monitor:
    """DeepSpeed's."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.events: list[tuple[str, float, int]] = []

    def write_events(self, events: list[tuple[str, float, int]]) -> None:
        self.events += events


@pytest.fixture
def status_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StatusFile:
    """The status of a rank that has made a step."""
    monkeypatch.setattr(attaching, "Attachment", Attachment)
    made = StatusFile(RankPlace(tmp_path, True, RUN, 0, 1, "train.py"), ledger)
    made.begin_forward(after_backward=False, count_tokens=lambda: 10)
    made.end_step(lambda: Progress(step=1))
    return made


@pytest.mark.parametrize(
    ("enabled", "rank", "is_told"), [(True, 0, True), (True, 1, False), (False, 0, False)]
)
def test_deepspeeds_monitor_is_told_where_there_is_one(
    status_file: StatusFile, enabled: bool, rank: int, is_told: bool
) -> None:
    monitor = Monitor(enabled=enabled)
    engine = SimpleNamespace(monitor=monitor, global_rank=rank, global_samples=64)
    module.write_events(engine, status_file)
    expected = {f"memascend/{name}": value for name, value in status_file.last_step().items()}
    assert {name: value for name, value, _ in monitor.events} == (expected if is_told else {})
    assert {samples for _, _, samples in monitor.events} == ({64} if is_told else set())


def line(status: StatusFile | None, logs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Log as the Trainer does; return what later callbacks and the history have."""
    state = SimpleNamespace(log_history=[dict(logs)])
    optimizer = SimpleNamespace(optimizer=SimpleNamespace(attachment=Attachment(status)))
    module.trainer_callback(Base)().on_log(None, state, None, logs=logs, optimizer=optimizer)
    return logs, state.log_history[0]


def test_a_line_of_the_trainer_has_the_step(status_file: StatusFile) -> None:
    for found in line(status_file, {"loss": 1.5}):
        assert found["loss"] == 1.5
        added = {name.removeprefix("memascend_") for name in found} - {"loss"}
        assert added == set(module.TRAINER_NAMES)


def test_other_lines_and_other_trainings_are_left_alone(status_file: StatusFile) -> None:
    assert line(status_file, {"eval_loss": 1.5})[0] == {"eval_loss": 1.5}
    assert line(None, {"loss": 1.5})[0] == {"loss": 1.5}
    logs = {"loss": 1.5}
    module.trainer_callback(Base)().on_log(None, None, None, logs=logs, optimizer=object())
    assert logs == {"loss": 1.5}
