"""One column of a comparison: the environment it gets, and what is noted of whatever it does."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from memascend.base.units import MIB
from memascend.cli.compare import run as running
from memascend.cli.compare.run import (
    Column,
    Run,
    child_environment,
    columns_by_name,
    find_losses,
    run_column,
)
from memascend.system import processes

PLAIN = Column("stock", {})
PATIENCE_S = 60.0


def shell(
    tmp_path: Path,
    script: str,
    *,
    column: Column = PLAIN,
    folders: Sequence[Path] = (),
    on_line: Callable[[Run, str], None] = lambda run, line: None,
) -> Run:
    """Runs a script of the shell as one column."""
    return run_column(
        column,
        ["/bin/sh", "-c", script],
        log=tmp_path / "log",
        folders=folders,
        interval_s=0.01,
        on_line=on_line,
    )


# -- losses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "losses"),
    [
        ("step 3 loss 1.25 time 0.5", ["1.25"]),
        ("loss: 1e-05", ["1e-05"]),
        ("loss=nan, lr=1e-3", ["nan"]),
        ("{'loss': 2.5, 'grad_norm': 1.0}", ["2.5"]),
        ("{'loss': '2.5', 'grad_norm': '1.0'}", ["2.5"]),
        (" iteration 1 | lm loss: 1.041E+01 | loss scale: 1.0 |", ["1.041E+01"]),
        ("Epoch 1, Loss -0.5.", ["-0.5"]),
        ("{'eval_loss': 2.5}", []),
        ("Attempted loss scale: 65536, reducing to 32768", []),
        ("loss_scale=128", []),
        ("closs 3", []),
    ],
)
def test_losses_are_found_in_what_scripts_print(line: str, losses: list[str]) -> None:
    assert find_losses(line) == losses


def test_losses_are_kept_as_they_were_printed_with_a_time_for_each_step(tmp_path: Path) -> None:
    run = shell(tmp_path, "echo loss 4.0; echo nothing; echo loss 1.0000000000000002; echo loss 4")
    assert run.losses == ["4.0", "1.0000000000000002", "4"]
    assert len(run.step_times_s) == 2
    assert sum(run.step_times_s) <= run.elapsed_s
    assert (run.exit_status, run.problem) == (0, "")


def test_a_run_without_losses_has_no_steps(tmp_path: Path) -> None:
    run = shell(tmp_path, "echo loss 4.0")
    assert (run.losses, run.step_times_s) == (["4.0"], [])


# -- columns and environments ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("supplied", "config_has_block", "given"),
    [
        (None, True, None),
        (None, False, "{}"),
        ('{"report": "r"}', True, '{"report": "r"}'),
        ('{"report": "r"}', False, '{"report": "r"}'),
    ],
)
def test_only_a_config_without_a_block_is_given_an_empty_one(
    monkeypatch: pytest.MonkeyPatch,
    supplied: str | None,
    config_has_block: bool,
    given: str | None,
) -> None:
    monkeypatch.delenv("MEMASCEND_CONFIG", raising=False)
    if supplied is not None:
        monkeypatch.setenv("MEMASCEND_CONFIG", supplied)
    columns = columns_by_name(config_has_block=config_has_block)
    assert columns["memascend"].environment.get("MEMASCEND_CONFIG") == given
    assert [name for name, column in columns.items() if column.expects_plugin] == ["memascend"]


def test_stock_is_off_and_tuned_stock_locks_exactly_what_it_needs() -> None:
    columns = columns_by_name(config_has_block=False)
    assert dict(columns["stock"].environment) == {"MEMASCEND_DISABLE": "1"}
    assert dict(columns["stock-tuned"].environment) == {
        "MEMASCEND_DISABLE": "1",
        "DS_PIN_MEMORY_BACKEND": "native",
        "PYTORCH_ALLOC_CONF": "pinned_max_round_threshold_mb:1",
    }


def test_a_child_has_our_environment_but_for_what_its_column_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEMASCEND_DISABLE", "1")
    monkeypatch.setenv("MEMASCEND_CONFIG", '{"overflow_check": {"enabled": false}}')
    monkeypatch.setenv("PATH", "/somewhere")
    monkeypatch.setenv("KEPT", "as it is")
    found = child_environment({"KEPT_NOT": "new", "PYTHONUNBUFFERED": "0"})
    assert not {"MEMASCEND_DISABLE", "MEMASCEND_CONFIG"} & set(found)
    assert found["PATH"] == os.pathsep.join([str(Path(sys.executable).parent), "/somewhere"])
    assert (found["KEPT"], found["KEPT_NOT"], found["PYTHONUNBUFFERED"]) == ("as it is", "new", "0")
    assert child_environment({})["PYTHONUNBUFFERED"] == "1"
    assert os.environ["MEMASCEND_DISABLE"] == "1"


def test_the_command_runs_in_the_environment_of_its_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMASCEND_CONFIG", "{}")
    lines: list[str] = []
    shell(
        tmp_path,
        'echo "off: $MEMASCEND_DISABLE; block: $MEMASCEND_CONFIG;"',
        column=columns_by_name(config_has_block=False)["stock"],
        on_line=lambda run, line: lines.append(line),
    )
    assert lines == ["off: 1; block: ;"]


# -- output and outcome ----------------------------------------------------------------------------


def test_all_output_is_logged_and_told_line_by_line(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []
    script = r"echo one; echo two >&2; printf 'loss 2.0 \377\n'; printf 'no end'"
    run = shell(tmp_path, script, on_line=lambda run, line: told.append((line, len(run.losses))))
    lines = ["one", "two", "loss 2.0 \N{REPLACEMENT CHARACTER}", "no end"]
    assert told == list(zip(lines, (0, 0, 1, 1), strict=True))
    assert run.log.read_text(encoding="utf-8") == "\n".join(lines)


def test_a_link_in_the_place_of_the_log_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "log").symlink_to("victim")
    assert shell(tmp_path, "echo one").log.read_text(encoding="utf-8") == "one\n"
    assert (tmp_path / "victim").read_text() == "mine"


@pytest.mark.parametrize(
    ("script", "status", "problem"),
    [
        ("exit 3", 3, "exit status 3"),
        ("kill -9 $$", -9, "exit status -9 (SIGKILL)"),
    ],
)
def test_a_run_that_fails_says_how(tmp_path: Path, script: str, status: int, problem: str) -> None:
    run = shell(tmp_path, f"echo loss 1.0; {script}")
    assert (run.exit_status, run.problem, run.losses) == (status, problem, ["1.0"])


def test_a_command_that_does_not_exist_is_a_problem_not_a_traceback(tmp_path: Path) -> None:
    command = [str(tmp_path / "missing"), "--lr", "1 e"]
    run = run_column(
        PLAIN,
        command,
        log=tmp_path / "log",
        folders=[],
        interval_s=0.01,
        on_line=lambda run, line: None,
    )
    assert "No such file" in run.problem
    assert f"{command[0]} --lr '1 e'" in run.problem


@pytest.mark.parametrize(
    ("line", "is_heard"),
    [("[INFO] memascend 0.1.0 armed: engine threads", True), ("memascend is not armed", False)],
)
def test_a_plugin_that_stayed_silent_is_a_problem(
    tmp_path: Path, line: str, is_heard: bool
) -> None:
    column = columns_by_name(config_has_block=True)["memascend"]
    run = shell(tmp_path, f"echo '{line}'", column=column)
    assert ("memascend doctor" in run.problem) == (not is_heard)
    assert not shell(tmp_path, "echo nothing").problem


def test_disk_use_is_measured_where_the_run_offloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "swap"
    folder.mkdir()
    (folder / "leftover").write_bytes(b"x" * 8 * MIB)
    os.utime(folder / "leftover", (1, 1))
    os.mkfifo(tmp_path / "gate")
    is_seen = threading.Event()
    measure = processes.disk_bytes

    def watched(path: Path, *, since: float) -> int:
        found = measure(path, since=since)
        if found:
            is_seen.set()
        return found

    def open_gate(run: Run, line: str) -> None:
        assert is_seen.wait(PATIENCE_S)
        (tmp_path / "gate").write_text("go\n")

    monkeypatch.setattr(processes, "DISK_INTERVAL_S", 0.01)
    monkeypatch.setattr(processes, "disk_bytes", watched)
    # Moved there as a whole: what is seen is all of it or nothing.
    script = (
        f"cd {tmp_path}; head -c {4 * MIB} /dev/zero > new; mv new swap; echo moved; read x < gate"
    )
    run = shell(tmp_path, script, folders=[folder], on_line=open_gate)
    assert run.peaks.disk_bytes == 4 * MIB
    assert run.samples
    assert shell(tmp_path, "true").peaks.disk_bytes == 0


@pytest.mark.parametrize("trap", ["", "trap '' TERM; "])
def test_an_interrupted_run_leaves_no_process_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: str
) -> None:
    monkeypatch.setattr(running, "TERMINATE_GRACE_S", 0.2)
    pids: list[int] = []

    def interrupt(run: Run, line: str) -> None:
        pids.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shell(tmp_path, f"{trap}sleep 30 & echo $!; wait", on_line=interrupt)
    [pid] = pids
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"


# -- what the run leaves of itself -----------------------------------------------------------------


def test_what_memascend_wrote_down_is_read_and_its_folder_is_gone(tmp_path: Path) -> None:
    script = (
        'echo "memascend 0.1.0 armed: engine threads"; echo "in $MEMASCEND_TRACE"; '
        'echo \'{"time_s": 5, "phase": "optimizer"}\' > $MEMASCEND_TRACE/7-0.trace.jsonl'
    )
    folders: list[Path] = []

    def hear(run: Run, line: str) -> None:
        folders.extend([Path(line.removeprefix("in "))] if line.startswith("in ") else [])

    column = columns_by_name(config_has_block=True)["memascend"]
    run = shell(tmp_path, script, column=column, on_line=hear)
    assert [(mark.time_s, mark.phase) for mark in run.recording.marks] == [(5.0, "optimizer")]
    assert run.started_s > 0
    [folder] = folders
    assert folder.name.startswith("memascend-compare-")
    assert not folder.exists()


def test_stock_is_not_asked_to_write_anything_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMASCEND_TRACE", "/somewhere")
    lines: list[str] = []
    column = columns_by_name(config_has_block=True)["stock"]
    run = shell(
        tmp_path, 'echo "<$MEMASCEND_TRACE>"', column=column, on_line=lambda _, x: lines.append(x)
    )
    assert lines == ["<>"]
    assert run.recording.marks == ()


def test_several_runs_of_a_column_have_numbers() -> None:
    assert Run(PLAIN, Path("log")).name == "stock"
    assert Run(PLAIN, Path("log"), number=2).name == "stock 2"
