"""Runs that are killed at random moments go on from their last complete checkpoint, exactly."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import kill_runs


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, float]:
    """A run of one rank that nobody killed."""
    return kill_runs.run_whole(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.deepspeed
@pytest.mark.full
def test_killed_runs_go_on_exactly(tmp_path: Path, undisturbed: tuple[str, float]) -> None:
    outcomes = kill_runs.run(1, seed=5, directory=tmp_path, whole=undisturbed)
    assert [outcome for outcome in outcomes if not outcome.is_right] == []


@pytest.mark.deepspeed
@pytest.mark.full
def test_killed_runs_of_two_ranks_whose_steps_begin_early_go_on_exactly(tmp_path: Path) -> None:
    kind = {"ranks": 2, "during_backward": True}
    outcomes = kill_runs.run(1, seed=2, directory=tmp_path, **kind)
    assert [outcome for outcome in outcomes if not outcome.is_right] == []


@pytest.mark.deepspeed
@pytest.mark.full
def test_killed_runs_whose_steps_are_guessed_go_on_exactly(tmp_path: Path) -> None:
    kind = {"during_backward": True, "guesses": True}
    outcomes = kill_runs.run(1, seed=3, directory=tmp_path, **kind)
    assert [outcome for outcome in outcomes if not outcome.is_right] == []


@pytest.mark.deepspeed
@pytest.mark.full
def test_a_run_killed_while_its_last_step_goes_on_behind_it_goes_on_exactly(
    tmp_path: Path, undisturbed: tuple[str, float]
) -> None:
    job = kill_runs.Job(tmp_path)
    expected = kill_runs.results(undisturbed[0])
    killed, _ = job.start("--die-behind", "3").communicate()
    assert kill_runs.BESIDE_THE_WALK in killed
    resumed, _ = job.finish()
    found = kill_runs.outcome_of(killed, resumed, expected, job)
    assert (found.saved, found.resumed) == (2, 2)
    assert found.is_right, found


def outcome(moment: str, saved: int, resumed: int, **changes: object) -> kill_runs.Outcome:
    facts = {"is_exact": True, "leftovers": ()} | changes
    return kill_runs.Outcome(moment, saved, resumed, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "is_right"),
    [
        (outcome("between", 2, 2), True),
        (outcome("in a save", 2, 4), True),  # renamed, and not told any more
        (outcome("in a save", 2, 0), False),
        (outcome("between", 2, 4), False),
        (outcome("in a step", 2, 4), False),
        (outcome("beside the walk", 2, 4), False),
        (outcome("in a step", 2, 2, is_exact=False), False),
        (outcome("in a save", 2, 2, leftovers=(".memascend-x.saving",)), False),
    ],
)
def test_what_counts_as_right(found: kill_runs.Outcome, is_right: bool) -> None:
    assert found.is_right is is_right
