"""`memascend compare`: which columns run, where and with what, and what is said of the outcome."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from memascend.base import charts
from memascend.base.units import MIB
from memascend.cli.compare import command as compare
from memascend.cli.compare.run import Column, Run
from memascend.cli.compare.warm_up import WarmUp
from memascend.cli.main import main
from memascend.errors import ConfigError
from memascend.system.processes import Sample

# Stands for a training run: says that it is armed when it is not off, and then takes less memory.
TRAINING = """
import os, time
is_off = os.environ.get("MEMASCEND_DISABLE") == "1"
if not is_off:
    print("memascend 0.1.0 armed: engine threads")
block = bytearray(b"x") * ((96 if is_off else 32) << 20)
for step, loss in enumerate([4.125, 2.0, 1.0000000000000002]):
    time.sleep(0.1)
    print(f"step {step} loss {loss!r} time 0.1")
"""


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave pictures empty: test_page.py has them."""
    monkeypatch.setattr(charts.Chart, "picture", lambda self, palette: b"<svg/>")


def compare_here(tmp_path: Path, *options: str, command: list[str]) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "out"
    status = main(["compare", "--out", str(out), *options, "--", *command])
    return status, json.loads((out / "report.json").read_text(encoding="utf-8"))


def test_equal_losses_and_less_memory_are_reported(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TRAINING]
    status, report = compare_here(tmp_path, "--no-warm-up", command=command)
    stock, ours = report["columns"]["stock"], report["columns"]["memascend"]
    assert status == 0
    assert report["losses_equal"]
    assert (
        stock["runs"][0]["losses"]
        == ours["runs"][0]["losses"]
        == ["4.125", "2.0", "1.0000000000000002"]
    )
    assert abs(stock["rss_bytes_max"] - ours["rss_bytes_max"] - 64 * MIB) < 8 * MIB
    assert stock["step_time_s_mean"] > 0
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "1.0000000000000002" in page


def test_that_there_will_be_no_charts_is_said_before_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    options = ("--no-warm-up", "--columns", "stock")
    status, _ = compare_here(tmp_path, *options, command=[sys.executable, "-c", "pass"])
    lines = capsys.readouterr().out.splitlines()
    assert status == 0
    assert lines[0].startswith("report.html will have no charts: matplotlib cannot be imported")
    assert lines[0].endswith("pip install 'memascend[plot]'")
    assert "This page has no charts" in (tmp_path / "out" / "report.html").read_text("utf-8")


# -- with runs that do not take place --------------------------------------------------------------


@dataclass
class Runs:
    """Stands for the runs: what was asked for, and what each column prints and suffers."""

    columns: list[Column] = field(default_factory=list)
    commands: list[list[str]] = field(default_factory=list)
    folders: list[tuple[Path, ...]] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)
    lines: Callable[[str], list[str]] = lambda name: ["loss 2.0", "loss 1.0"]
    problems: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    def run(self, column: Column, command: list[str], **details: Any) -> Run:
        self.columns.append(column)
        self.commands.append(command)
        self.folders.append(details["folders"])
        self.logs.append(details["log"].name)
        run = Run(
            column,
            details["log"],
            number=details["number"],
            exit_status=0,
            problem=self.problems.get(column.name, ""),
        )
        run.samples.append(Sample(0.0, {1: MIB}, locked_bytes=0, registered_bytes=0))
        lines = self.lines(column.name)
        run.log.write_text("\n".join(lines), encoding="utf-8")
        for line in lines:
            run.losses += [line.removeprefix("loss ")] if line.startswith("loss ") else []
            details["on_line"](run, line)
        return run


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    stand_in = Runs()
    monkeypatch.setattr(compare, "run_column", stand_in.run)
    monkeypatch.setattr(compare, "warm_up", lambda log, on_news: WarmUp())
    monkeypatch.setattr(compare, "find_program", lambda name: name)
    return stand_in


def test_a_configuration_that_is_none_is_refused_by_its_key(tmp_path: Path) -> None:
    for zero, key in (
        ("on", "zero_optimization"),
        ({"offload_param": "nvme"}, "zero_optimization.offload_param"),
        ({"offload_param": {"device": "NVME"}}, "zero_optimization.offload_param.device"),
    ):
        config = write_config(tmp_path, zero_optimization=zero)
        with pytest.raises(ConfigError, match=f"{key}: .* is not allowed"):
            compare.read_target([str(config)])
    assert compare.read_target([str(write_config(tmp_path, zero_optimization=None))]).folders == ()


def write_config(folder: Path, **keys: Any) -> Path:
    offload = {"device": "nvme", "nvme_path": "swap"}
    zero = {"stage": 3, "offload_param": offload, "offload_optimizer": offload}
    config = folder / "ds.json"
    config.write_text(json.dumps({"zero_optimization": zero} | keys), encoding="utf-8")
    return config


def spoken(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_columns_run_once_each_in_the_order_asked_for(tmp_path: Path, runs: Runs) -> None:
    compare_here(tmp_path, command=["true"])
    assert runs.names == ["stock", "memascend"]
    runs.columns.clear()
    options = ["--columns", "memascend,stock,memascend", "--tuned"]
    _, report = compare_here(tmp_path, *options, command=["true"])
    assert runs.names == list(report["columns"]) == ["memascend", "stock", "stock-tuned"]


def test_an_unknown_column_is_a_usage_error(
    runs: Runs, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["compare", "--out", str(tmp_path / "out"), "--columns", "stcok", "--", "true"])
    assert caught.value.code == 2
    assert "stock, memascend, stock-tuned" in spoken_error(capsys)
    assert not (tmp_path / "out").exists()


def spoken_error(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("option", [["--deepspeed", "{}"], ["--deepspeed_config={}"]])
@pytest.mark.parametrize("has_block", [True, False])
def test_the_config_is_found_in_the_command_which_stays_as_it_is(
    tmp_path: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch, option: list[str], has_block: bool
) -> None:
    monkeypatch.delenv("MEMASCEND_CONFIG", raising=False)
    config = write_config(tmp_path, **({"memascend": {}} if has_block else {}))
    command = ["train.py", *(word.format(config) for word in option)]
    compare_here(tmp_path, "--columns", "memascend", command=command)
    [column] = runs.columns
    assert column.environment.get("MEMASCEND_CONFIG") == (None if has_block else "{}")
    assert runs.commands == [command]
    assert runs.folders == [(Path("swap"),)]


def test_the_first_different_loss_is_told_and_is_no_success(
    tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.lines = lambda name: ["loss 9.5", f"loss {len(name)}"]
    status, report = compare_here(tmp_path, command=["true"])
    assert status == 1
    assert report["losses_equal"] is False
    assert "first in loss 1: 5 and 9" in spoken(capsys)


def test_losses_are_told_as_they_are_printed(
    tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.lines = lambda name: ["loading", "loss 9.25", "saving"]
    compare_here(tmp_path, "--columns", "stock", command=["true"])
    printed = capsys.readouterr().out.splitlines()
    assert "  loss 9.25" in printed
    assert not any("loading" in line or "saving" in line for line in printed)


def test_a_failed_run_shows_the_end_of_its_log_and_ends_the_comparison(
    tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.problems["stock"] = "exit status 1"
    runs.lines = lambda name: [f"[bold] not enough buffers in {name}"]
    status, report = compare_here(tmp_path, command=["true"])
    assert status == 1
    assert report["columns"]["stock"]["runs"][0]["problem"] == "exit status 1"
    assert runs.names == ["stock"]
    printed = spoken(capsys)
    assert "[bold] not enough buffers in stock" in printed
    assert "--keep-going" in printed
    assert "last loss" not in printed  # no table without a run that counts


def test_told_to_keep_going_the_others_still_run(
    tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.problems["stock"] = "exit status 1"
    status, report = compare_here(tmp_path, "--keep-going", command=["true"])
    assert status == 1
    assert not report["columns"]["memascend"]["runs"][0]["problem"]
    printed = spoken(capsys)
    assert "last loss" in printed
    assert "stopped at the first failure" not in printed


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["nosuchprogram", "train.py"], "'nosuchprogram' is not a program"),
        (["true", "--deepspeed", "nosuch.json"], "--deepspeed nosuch.json: no such file"),
        (["true", "--deepspeed_config=nosuch.json"], "--deepspeed_config nosuch.json: no such"),
    ],
)
def test_a_command_or_a_json_that_is_missing_is_refused_before_the_warm_up(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    said: str,
) -> None:
    monkeypatch.setattr(compare, "warm_up", lambda log, on_news: pytest.fail("it was warmed up"))
    assert main(["compare", "--out", str(tmp_path / "out"), "--", *command]) == 1
    assert said in spoken_error(capsys)
    assert not (tmp_path / "out").exists()


def test_repeated_columns_take_turns_and_keep_every_log(
    tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = compare_here(tmp_path, "--repeat", "2", command=["true"])
    assert status == 0
    assert runs.names == ["stock", "memascend", "stock", "memascend"]
    assert runs.logs == ["stock-1.log", "memascend-1.log", "stock-2.log", "memascend-2.log"]
    assert [len(column["runs"]) for column in report["columns"].values()] == [2, 2]
    assert "stock 2 of 2" in spoken(capsys)


def test_once_is_once_without_a_number(tmp_path: Path, runs: Runs) -> None:
    compare_here(tmp_path, command=["true"])
    assert runs.logs == ["stock.log", "memascend.log"]


@pytest.mark.parametrize("count", ["0", "-1"])
@pytest.mark.parametrize("name", ["--repeat", "--interval-ms"])
def test_less_than_once_is_a_usage_error(
    runs: Runs, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, count: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["compare", "--out", str(tmp_path / "out"), name, count, "--", "true"])
    assert caught.value.code == 2
    assert f"{name} {count} is not allowed. Allowed: a whole number of at least 1" in (
        spoken_error(capsys)
    )
    assert runs.names == []


@pytest.mark.parametrize("is_file", [True, False])
def test_a_folder_that_cannot_be_written_is_refused_before_a_run(
    runs: Runs, capsys: pytest.CaptureFixture[str], tmp_path: Path, is_file: bool
) -> None:
    out = tmp_path / "file" if is_file else Path("/proc/self/compare")
    (tmp_path / "file").touch()
    assert main(["compare", "--out", str(out), "--", "true"]) == 1
    assert f"--out {out}: results cannot be written there" in spoken_error(capsys)
    assert runs.names == []


def test_results_are_shown_also_where_they_cannot_be_kept(
    runs: Runs, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compare, "write_page", full)
    assert main(["compare", "--out", str(tmp_path / "out"), "--", "true"]) == 1
    captured = capsys.readouterr()
    assert "last loss" in captured.out
    assert "No space left on device" in captured.err


def test_the_page_has_the_configuration_that_the_command_names(tmp_path: Path, runs: Runs) -> None:
    config = write_config(tmp_path, gradient_clipping=0.125)
    compare_here(tmp_path, command=["train.py", str(config)])
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "&#34;gradient_clipping&#34;: 0.125" in page


# -- the warm-up -----------------------------------------------------------------------------------


@pytest.mark.parametrize("has_config", [True, False])
def test_without_libaio_stock_is_left_out_and_the_rest_goes_on(
    tmp_path: Path,
    runs: Runs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    has_config: bool,
) -> None:
    found = WarmUp(baseline_bytes=MIB, unavailable={"AsyncIOBuilder": "no libaio.h"})
    monkeypatch.setattr(compare, "warm_up", lambda log, on_news: found)
    command = ["train.py", str(write_config(tmp_path))] if has_config else ["train.py"]
    status, report = compare_here(tmp_path, "--tuned", command=command)
    assert status == 0
    assert list(report["columns"]) == runs.names == ["memascend"]
    assert set(report["skipped"]) == {"stock", "stock-tuned"}
    assert "no libaio.h" in spoken(capsys)


def test_what_does_not_offload_to_a_drive_needs_no_libaio(
    tmp_path: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = WarmUp(unavailable={"AsyncIOBuilder": "no libaio.h"})
    monkeypatch.setattr(compare, "warm_up", lambda log, on_news: found)
    config = write_config(tmp_path, zero_optimization={"stage": 3})
    compare_here(tmp_path, command=["train.py", str(config)])
    assert runs.names == ["stock", "memascend"]


@pytest.mark.parametrize(("columns", "expected"), [("stock,memascend", []), ("stock", ["stock"])])
def test_a_deepspeed_that_memascend_refuses_is_told_before_hours_of_stock(
    tmp_path: Path,
    runs: Runs,
    monkeypatch: pytest.MonkeyPatch,
    columns: str,
    expected: list[str],
) -> None:
    found = WarmUp(refusal="DeepSpeed 0.18.4 is older")
    monkeypatch.setattr(compare, "warm_up", lambda log, on_news: found)
    words = ["compare", "--out", str(tmp_path / "out"), "--columns", columns, "--", "train.py"]
    status = main(words)
    assert runs.names == expected
    assert status == (0 if expected else 1)


def test_a_warm_up_that_fails_is_told_and_costs_nothing_but_the_baseline(
    tmp_path: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(log: Path, on_news: Callable[[str], None]) -> WarmUp:
        log.write_text("ImportError: no torch\n", encoding="utf-8")
        on_news("importing torch")
        on_news("")
        return WarmUp(problem="exit status 1")

    monkeypatch.setattr(compare, "warm_up", fail)
    status, report = compare_here(tmp_path, command=["true"])
    assert (status, report["baseline_bytes"]) == (0, 0)
    printed = spoken(capsys)
    for part in ("importing torch", "exit status 1", "ImportError: no torch"):
        assert part in printed


# -- what the command itself says ------------------------------------------------------------------


def test_offload_folders_come_from_the_config_unless_an_option_names_one(tmp_path: Path) -> None:
    command = ["train.py", "--deepspeed", str(write_config(tmp_path))]
    assert compare.read_target(command).folders == (Path("swap"),)
    assert compare.read_target([*command, "--nvme-path", "/ssd"]).folders == (Path("/ssd"),)
    assert compare.read_target([*command, "--nvme-path=/ssd"]).folders == (Path("/ssd"),)
    assert compare.read_target(command, Path("/mine")).folders == (Path("/mine"),)
    assert compare.read_target(["train.py"]).folders == ()


def test_only_what_is_a_deepspeed_config_is_taken_for_one(tmp_path: Path) -> None:
    for name, text in (
        ("data.json", '{"rows": 3}'),
        ("list.json", "[1]"),
        ("damaged.json", "{"),
        ("empty.json", ""),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
    names = ("data.json", "list.json", "damaged.json", "empty.json", "missing.json", "")
    words = [str(tmp_path / name) for name in names]
    assert compare.read_target(words) == compare.Target(None, ())
    config = write_config(tmp_path, memascend={})
    target = compare.read_target([*words, str(config), str(tmp_path / "data.json")])
    assert target.has_block
    assert target.folders == (Path("swap"),)


@pytest.mark.parametrize(
    ("zero", "folders"),
    [
        ({}, ()),
        ({"offload_param": None}, ()),
        ({"offload_param": {"device": "cpu", "nvme_path": "/a"}}, ()),
        ({"offload_param": {"device": "nvme", "nvme_path": "/a"}}, (Path("/a"),)),
        (
            {
                "offload_param": {"device": "nvme", "nvme_path": "/a"},
                "offload_optimizer": {"device": "nvme", "nvme_path": "/b"},
            },
            (Path("/a"), Path("/b")),
        ),
    ],
)
def test_each_folder_on_a_drive_is_found(
    tmp_path: Path, zero: dict[str, Any], folders: tuple[Path, ...]
) -> None:
    config = write_config(tmp_path, zero_optimization=zero)
    assert compare.read_target([str(config)]).folders == folders
