"""What a training tells while it runs: one run, looked at from all sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.program import RunProgram

from .monitor_program import ACCUMULATION, STEPS, TOKENS

PROGRAM = Path(__file__).with_name("monitor_program.py")

pytestmark = pytest.mark.deepspeed


@pytest.fixture(scope="module")
def found(run_program: RunProgram, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_program(str(PROGRAM), str(tmp_path_factory.mktemp("monitor")))


def test_a_running_rank_is_alive_and_in_a_phase(found: Any) -> None:
    backward = found["backward"]
    assert backward["is_alive"]
    assert backward["status"]["phase"] == "backward"
    assert backward["status"]["step"] == STEPS - 1
    assert found["stepped"]["status"]["phase"] == "other"


def test_a_step_has_times_of_every_phase_and_what_it_moved(found: Any) -> None:
    status = found["stepped"]["status"]
    assert (status["step"], status["steps_total"]) == (STEPS, 100)
    for name in ("forward", "backward", "optimizer"):
        assert status["last"][name] > 0, name
    seconds = sum(status["mean"][name] for name in ("forward", "backward", "optimizer", "other"))
    tokens = 2 * TOKENS * ACCUMULATION
    assert status["tokens_per_second"] == pytest.approx(tokens / seconds)
    assert status["samples_per_second"] == pytest.approx(2 * ACCUMULATION / seconds)
    (volume,) = status["ledger"]["volumes"]
    assert volume["bytes_written"] > 0
    assert len(status["rates"]) == 1
    assert status["ledger"]["limit_bytes"] == 64 << 20
    assert status["ledger"]["wear"]["steps"] == STEPS


def test_deepspeeds_own_logs_have_each_step(found: Any) -> None:
    samples = [str(2 * ACCUMULATION * (step + 1)) for step in range(STEPS)]
    for name in ("memascend_step_seconds", "memascend_bytes_written", "Train_Samples_lr"):
        rows = [row.split(",") for row in found["csv"][name][1:]]
        assert [row[0] for row in rows] == samples, name
    # Of the first step the optimizer goes on behind it.
    later = found["csv"]["memascend_bytes_written"][2:]
    assert all(float(row.split(",")[1]) > 0 for row in later)


def test_the_end_is_told(found: Any) -> None:
    assert found["finished"]["status"]["phase"] == "finished"
