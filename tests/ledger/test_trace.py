"""The trace of a run: phases as they end, memory as it changes; a reader that expects anything."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from memascend.ledger import trace as module
from memascend.ledger.trace import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    OTHER,
    SETUP,
    Measures,
    Recording,
    Trace,
    read_recording,
)


class Counters:
    """Counters that a test sets, and a clock that goes on by a second with every look."""

    def __init__(self) -> None:
        self.now = Measures(components={"slots": 4})
        self._clock: Iterator[float] = iter(range(10**9))

    def read(self) -> Measures:
        return self.now

    def clock(self) -> float:
        return float(next(self._clock))


@pytest.fixture
def counters() -> Counters:
    return Counters()


def start(folder: Path, counters: Counters) -> Trace:
    return Trace(folder, counters.read, counters.clock)


def phases(folder: Path) -> list[str]:
    return [mark.phase for mark in read_recording(folder).marks]


def test_each_phase_is_noted_at_its_end(tmp_path: Path, counters: Counters) -> None:
    trace = start(tmp_path, counters)
    for _ in range(2):
        with trace.phase(FORWARD):
            pass
        with trace.phase(OPTIMIZER):
            pass
    assert phases(tmp_path) == [
        *(SETUP, SETUP, FORWARD, BACKWARD, OPTIMIZER),
        *(OTHER, FORWARD, BACKWARD, OPTIMIZER),
    ]
    found = read_recording(tmp_path)
    assert [mark.time_s for mark in found.marks] == list(range(9))
    assert found.step_count == 2


def test_micro_steps_have_a_backward_each(tmp_path: Path, counters: Counters) -> None:
    trace = start(tmp_path, counters)
    for _ in range(2):
        with trace.phase(FORWARD):
            pass
    assert phases(tmp_path) == [SETUP, SETUP, FORWARD, BACKWARD, FORWARD]


def test_a_phase_that_fails_is_over_nevertheless(tmp_path: Path, counters: Counters) -> None:
    trace = start(tmp_path, counters)
    with pytest.raises(RuntimeError), trace.phase(FORWARD):
        raise RuntimeError
    assert phases(tmp_path)[-1] == FORWARD


def test_counters_come_back_and_components_are_written_when_they_change(
    tmp_path: Path, counters: Counters
) -> None:
    trace = start(tmp_path, counters)
    counters.now = replace(counters.now, read_bytes=7, drive_wait_s=0.5, optimizer_wait_s=0.25)
    trace.mark()
    counters.now = replace(counters.now, components={"tiles": 9}, device_wait_s=0.125)
    trace.mark()
    [path] = tmp_path.iterdir()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert ["components" in line for line in lines] == [True, False, True]
    first, second, third = (mark.measures for mark in read_recording(tmp_path).marks)
    assert first == Measures(components={"slots": 4})
    assert second == replace(first, read_bytes=7, drive_wait_s=0.5, optimizer_wait_s=0.25)
    assert third == counters.now


def test_the_account_ends_it(tmp_path: Path, counters: Counters) -> None:
    trace = start(tmp_path, counters)
    trace.end({"rows": [1, 2]})
    trace.mark()  # no more
    found = read_recording(tmp_path)
    assert found.ledger == {"rows": [1, 2]}
    assert len(found.marks) == 2


def test_of_several_models_the_one_with_most_steps_counts(
    tmp_path: Path, counters: Counters
) -> None:
    reference, trained = (start(tmp_path, counters) for _ in range(2))
    with trained.phase(OPTIMIZER):
        pass
    reference.end({"whose": "reference"})
    trained.end({"whose": "trained"})
    assert len(list(tmp_path.iterdir())) == 2
    assert read_recording(tmp_path).ledger == {"whose": "trained"}


def test_a_folder_that_cannot_be_written_costs_the_trace_alone(
    tmp_path: Path, counters: Counters, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="memascend"):
        trace = start(tmp_path / "missing", counters)
    trace.mark()
    trace.end({})
    assert "MEMASCEND_TRACE" in caplog.text
    assert str(tmp_path / "missing") in caplog.text


def test_a_full_drive_ends_the_trace_and_not_the_run(
    tmp_path: Path, counters: Counters, caplog: pytest.LogCaptureFixture
) -> None:
    class Full:
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    trace = start(tmp_path, counters)
    trace._file = Full()  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING, logger="memascend"):
        trace.mark()
        trace.mark()
    assert caplog.text.count("No space left on device") == 1


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        "7",
        "null",
        '{"time_s": 1}',
        '{"time_s": "soon", "phase": "forward"}',
        '{"time_s": 1, "phase": "forward", "something": 1}',
        '{"ledger": 7}',
        "[" * 100_000,
        '{"time_s": 1, "phase": "forward", "components": {"a": 1',
    ],
)
def test_a_line_that_is_none_of_its_own_is_passed_over(tmp_path: Path, line: str) -> None:
    good = '{"time_s": 1, "phase": "forward", "components": {"a": 1}}'
    (tmp_path / "7-0.trace.jsonl").write_text(f"{good}\n{line}\n{good}")
    found = read_recording(tmp_path)
    assert len(found.marks) == 2
    assert found.ledger == {}


def test_bytes_that_are_no_text_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "7-0.trace.jsonl").write_bytes(b"\xff\xfe\n")
    assert read_recording(tmp_path) == Recording([], {})


def test_no_trace_is_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "8-0.trace.jsonl").mkdir()
    assert read_recording(tmp_path).marks == []
    assert read_recording(tmp_path / "missing") == Recording()


def test_the_names_of_files_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FILES_MAX", 2)
    traces = [start(tmp_path, Counters()) for _ in range(3)]
    assert len(list(tmp_path.iterdir())) == 2
    traces[-1].mark()
