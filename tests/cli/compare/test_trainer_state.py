"""Losses of the Trainer: every digit from its file, if the file is that of the run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from memascend.cli.compare.run import Run
from memascend.cli.compare.trainer_state import output_folders, read_all_digits, use_all_digits
from tests.support.comparisons import make_run


def write_state(folder: Path, *losses: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, object]] = [
        {"loss": loss, "step": step} for step, loss in enumerate(losses)
    ]
    path = folder / "trainer_state.json"
    path.write_text(json.dumps({"log_history": [*rows, {"eval_loss": 9.0}, {"train_loss": 2.0}]}))
    return path


def ran(*losses: str, problem: str = "") -> Run:
    """Return a run that has just begun, and has printed these."""
    run = make_run("stock", *losses, problem=problem)
    run.started_s = time.monotonic() - 1
    return run


def test_the_losses_have_all_digits(tmp_path: Path) -> None:
    write_state(tmp_path / "checkpoint-2", 8.376953125, 8.1)
    run = ran("8.377", "8.1")
    read_all_digits(run, [tmp_path])
    assert run.exact_losses == ["8.376953125", "8.1"]
    assert run.losses == ["8.377", "8.1"]
    use_all_digits([run])
    assert run.losses == ["8.376953125", "8.1"]


def test_a_resumed_run_has_the_last_losses_of_its_file(tmp_path: Path) -> None:
    write_state(tmp_path, 9.5, 8.376953125, 8.1)
    run = ran("8.377", "8.1")
    read_all_digits(run, [tmp_path])
    assert run.exact_losses == ["8.376953125", "8.1"]


def test_the_newest_file_with_the_printed_losses_counts(tmp_path: Path) -> None:
    now = time.time()
    for age, (name, loss) in enumerate((("a", 9.25), ("b", 2.0002), ("c", 2.0001))):
        path = write_state(tmp_path / name, loss)
        os.utime(path, (now - age / 100, now - age / 100))
    run = ran("2.0")
    read_all_digits(run, [tmp_path])
    assert run.exact_losses == ["2.0002"]


@pytest.mark.parametrize("losses", [(), (2.0,), (2.0, 3.0), (2.0, None), (2.0, "1.5")])
def test_another_file_changes_nothing(tmp_path: Path, losses: tuple[object, ...]) -> None:
    write_state(tmp_path, *losses)
    run = ran("2.0", "1.5")
    read_all_digits(run, [tmp_path, tmp_path / "missing"])
    assert run.exact_losses == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"log_history": 3}', '{"log_history": [3]}'])
def test_what_is_no_state_changes_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "trainer_state.json").write_text(text)
    run = ran("2.0")
    read_all_digits(run, [tmp_path])
    assert run.exact_losses == []


def test_a_file_older_than_the_run_is_not_its_own(tmp_path: Path) -> None:
    path = write_state(tmp_path, 2.0)
    os.utime(path, (time.time() - 100, time.time() - 100))
    run = ran("2.0")
    read_all_digits(run, [tmp_path])
    assert run.exact_losses == []


def test_printed_digits_are_compared_if_one_run_has_no_others(tmp_path: Path) -> None:
    full, printed, failed = ran("8.377"), ran("8.377"), ran("8.377", problem="exit status 1")
    full.exact_losses = ["8.376953125"]
    use_all_digits([full, failed])
    assert full.losses == ["8.376953125"]
    full.losses = ["8.377"]
    use_all_digits([full, printed])
    assert full.losses == printed.losses == ["8.377"]


def test_the_folder_is_that_of_an_option_or_of_a_file(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text('model: x\noutput_dir: "out/yaml"  # here\n')
    words = ["train.py", "--output_dir", "a", "--output-dir", "b", "--output", "a", str(recipe)]
    assert output_folders([*words, "missing.yml"]) == (Path("a"), Path("b"), Path("out/yaml"))
    assert output_folders(["train.py"]) == ()
