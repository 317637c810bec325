"""`memascend monitor`: what it shows, when it ends, and what it says where there is nothing."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from memascend.cli import monitor
from memascend.cli.main import main
from memascend.cli.monitor import view
from memascend.monitor.runs import RankFile
from memascend.monitor.status import FINISHED, Status
from tests.support import statuses
from tests.support.statuses import RUN, ledger, status


def shown(*ranks: Status | RankFile, width: int = 100, now: float = 1_700_000_060.0) -> str:
    files = [
        rank if isinstance(rank, RankFile) else RankFile(Path("rank-0.json"), rank, True)
        for rank in ranks
    ]
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(view(files, now))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# -- the view ------------------------------------------------------------------------------------


def test_a_run_is_shown_with_speed_parts_drives_components_and_wear() -> None:
    text = shown(status(), status(rank=1))
    for part in (
        "train.py  step 30 of 500  2 ranks",
        "2.00 s a step, 2,048 tokens/s, 4.00 samples/s, 15 min 40 s left",
        "forward 25 %, backward 50 %, optimizer 12 %, other 12 %",
        "training waited 0.75 s of a step for the drives",
        "written to the drive: 2.93 GiB",
        "of the stated endurance",
        "backward 0.50 s",
        "0.40 GB/s",
        "0.20 GB/s",
        "50 %",
        "optimizer tiles",
    ):
        assert part in text, text
    assert [line.split()[0] for line in text.splitlines() if "backward 0.50" in line] == ["0", "1"]


@pytest.mark.parametrize("width", [80, 120])
def test_no_number_is_cut_off(width: int) -> None:
    (volume,) = ledger().volumes
    long = replace(volume, path="/mnt/a/very/long/path/to/the/folder/of/a/drive/for/swapping")
    rates = [replace(rate, path=long.path, read=12e9) for rate in status().rates]
    text = shown(status(ledger=ledger(volumes=(long,)), rates=rates), width=width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for number in ("12.00 GB/s", "0.10 GB/s", "2 ms", "8 ms", "48.00 MiB", "500.00 MiB"):
        assert number in text


def test_before_the_first_step_there_is_what_is_known() -> None:
    text = shown(
        status(step=0, steps_total=None, last=None, mean=None, rates=(), tokens_per_second=None)
    )
    assert "step 0  2 ranks, 1 of them here" in text
    assert "a step" not in text
    assert "staging slots" in text


@pytest.mark.parametrize(
    ("changes", "is_alive", "state"),
    [
        ({}, True, "backward 3.50 s"),
        ({}, None, "backward 3.50 s"),
        ({"written_at": 1_700_000_000.0}, None, "backward 1 min 3 s, silent"),
        ({"written_at": 1_700_000_000.0}, True, "backward 1 min 3 s"),
        ({}, False, "died in backward"),
        ({"phase": FINISHED}, False, "finished"),
    ],
)
def test_the_state_of_a_rank(changes: dict[str, object], is_alive: bool | None, state: str) -> None:
    rank = RankFile(Path("rank-0.json"), status(**changes), is_alive)
    text = shown(rank, now=1_700_000_063.0)
    (line,) = [line for line in text.splitlines() if line.startswith("0 ")]
    assert f" {state}  " in line


def test_what_cannot_be_read_is_said_beside_the_others() -> None:
    broken = RankFile(Path("rank-1.json"), None, None, "rank-1.json is not a status: [bold] half")
    text = shown(status(), broken)
    assert "unreadable" in text
    assert "[bold] half" in text
    assert "unreadable" in shown(broken)


def test_text_of_a_file_is_shown_as_it_is_and_controls_no_terminal() -> None:
    (volume,) = ledger().volumes
    drive = replace(volume, path="/[a]/[/b]")
    text = shown(status(program="[red]a\x1b[2J.py", ledger=ledger(volumes=(drive,))), width=120)
    assert "[red]a?[2J.py" in text
    assert "/[a]/[/b]" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.004, "0.00 s"),
        (59, "59 s"),
        (61, "1 min 1 s"),
        (3 * 3600 + 60, "3 h 1 min"),
        (10**6, "11 d 13 h"),
    ],
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert monitor._seconds(seconds) == text


# -- the command ---------------------------------------------------------------------------------


def test_one_look_is_printed_without_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    statuses.write(tmp_path, status(), status(rank=1))
    for arguments in ([], ["--once"]):
        assert main(["monitor", str(tmp_path), *arguments]) == 0
        printed = capsys.readouterr().out
        assert f"run {RUN}" in printed
        assert "\x1b" not in printed


def test_a_rank_that_died_is_a_problem(tmp_path: Path) -> None:
    died = replace(status().process, started=1)
    statuses.write(tmp_path, status(), status(rank=1, process=died))
    assert main(["monitor", str(tmp_path), "--once"]) == 1


def test_no_run_is_an_error_that_says_where_it_was_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["monitor", str(tmp_path)]) == 1
    assert f"no run was found: {tmp_path}" in capsys.readouterr().err
    assert main(["monitor", str(tmp_path / "x")]) == 1
    assert "there is no run" in capsys.readouterr().err


def test_a_file_for_prometheus_is_written(tmp_path: Path) -> None:
    statuses.write(tmp_path, status())
    path = tmp_path / "memascend.prom"
    assert main(["monitor", str(tmp_path), "--once", "--prometheus", str(path)]) == 0
    assert 'memascend_running{rank="0"} 1.0\n' in path.read_text()


@pytest.mark.parametrize(
    ("name", "reason"),
    [("x.txt", "only files named *.prom"), ("none/x.prom", "no folder"), ("d.prom", "has")],
)
def test_a_file_that_would_not_be_read_or_cannot_be_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    statuses.write(tmp_path, status())
    (tmp_path / "d.prom").mkdir()
    assert main(["monitor", str(tmp_path), "--prometheus", str(tmp_path / name)]) == 1
    error = capsys.readouterr().err
    assert f"--prometheus {tmp_path / name}" in error
    assert reason in error


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Callable[[], object]]]:
    """What happens to the run between two looks."""
    events: list[Callable[[], object]] = []

    def sleep(seconds: float) -> None:
        assert seconds == monitor.INTERVAL_S
        events.pop(0)()

    monkeypatch.setattr(monitor.time, "sleep", sleep)
    return lambda *given: events.extend(given) or events


def arguments(folder: Path, **others: object) -> argparse.Namespace:
    values = {"name": str(folder), "once": False, "prometheus": None, **others}
    return argparse.Namespace(**values)


def test_on_a_terminal_a_run_is_watched_until_it_ends(
    tmp_path: Path, scripted: Callable[..., list[Callable[[], object]]]
) -> None:
    folder = statuses.write(tmp_path, status())
    events = scripted(
        lambda: statuses.write(tmp_path, status(step=31)),
        lambda: statuses.write(tmp_path, status(step=32, phase=FINISHED)),
    )
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    assert monitor.monitor_command(arguments(folder), console) == 0
    assert events == []
    assert isinstance(console.file, io.StringIO)
    for text in ("step 31 of 500", "step 32 of 500", "finished"):
        assert text in console.file.getvalue()


def test_without_a_terminal_prometheus_is_told_until_the_run_is_gone(
    tmp_path: Path, scripted: Callable[..., list[Callable[[], object]]]
) -> None:
    folder = statuses.write(tmp_path, status())
    path, seen = tmp_path / "x.prom", []
    scripted(
        lambda: seen.append(path.read_text()),
        (folder / "rank-0.json").unlink,
    )
    console = Console(file=io.StringIO())
    with pytest.raises(monitor.ConfigError, match="the run is gone"):
        monitor.monitor_command(arguments(folder, prometheus=path), console)
    assert 'memascend_steps_total{rank="0"} 30.0' in seen[0]
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == ""
