"""Runs that are killed at random moments go on from their last complete checkpoint, exactly."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import kill_runs


@pytest.mark.deepspeed
@pytest.mark.full
def test_killed_runs_go_on_exactly(tmp_path: Path) -> None:
    outcomes = kill_runs.run(2, seed=5, directory=tmp_path)
    assert [outcome for outcome in outcomes if not outcome.is_right] == []


@pytest.mark.deepspeed
@pytest.mark.full
def test_a_run_killed_while_its_last_step_goes_on_behind_it_goes_on_exactly(
    tmp_path: Path,
) -> None:
    folders = [tmp_path / name for name in ("whole", "killed")]
    for folder in folders:
        folder.mkdir()
    whole, job = map(kill_runs.Job, folders)
    expected = kill_runs.results(whole.finish()[0])
    killed, _ = job.start("--die-behind", "3").communicate()
    assert kill_runs.BESIDE_THE_WALK in killed
    resumed, _ = job.finish()
    found = kill_runs.outcome_of(killed, resumed, expected, job)
    assert (found.saved, found.resumed) == (3, 3)
    assert found.is_right, found


def outcome(moment: str, saved: int, resumed: int, **changes: object) -> kill_runs.Outcome:
    facts = {"is_exact": True, "leftovers": ()} | changes
    return kill_runs.Outcome(moment, saved, resumed, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "is_right"),
    [
        (outcome("between", 3, 3), True),
        (outcome("in a save", 3, 4), True),  # renamed, and not told any more
        (outcome("in a save", 3, 2), False),
        (outcome("between", 3, 4), False),
        (outcome("in a step", 3, 4), False),
        (outcome("in a step", 3, 3, is_exact=False), False),
        (outcome("in a save", 3, 3, leftovers=(".memascend-x.saving",)), False),
    ],
)
def test_what_counts_as_right(found: kill_runs.Outcome, is_right: bool) -> None:
    assert found.is_right is is_right
