"""`memascend compare` on small stand-ins for a training run."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from memascend.base.units import MIB
from memascend.cli.compare import command as compare
from memascend.cli.compare.run import Column, Run, columns_by_name, find_losses, run_column
from memascend.cli.compare.warm_up import WarmUp
from memascend.cli.main import main
from memascend.system import processes

# Stands for a training run: prints what it was told, and says that it is armed when it is not off.
TRAINING = """
import json, os, sys, time
is_off = os.environ.get("MEMASCEND_DISABLE") == "1"
if not is_off:
    print("memascend 0.1.0 armed: engine threads")
print("environment", json.dumps(dict(os.environ)))
print("arguments", json.dumps(sys.argv[1:]))
block = bytearray(b"x") * ((96 if is_off else 32) << 20)
{body}
for step, loss in enumerate([4.125, 2.0, 1.0000000000000002]):
    time.sleep(0.1)
    print(f"step {{step}} loss {{loss!r}} time 0.1")
"""


def training(tmp_path: Path, body: str = "") -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(TRAINING.format(body=body), encoding="utf-8")
    return [sys.executable, str(script)]


def compare_here(tmp_path: Path, command: list[str], *options: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "out"
    status = main(["compare", "--out", str(out), "--no-warm-up", *options, "--", *command])
    return status, json.loads((out / "report.json").read_text(encoding="utf-8"))


def logged(tmp_path: Path, column: str, word: str) -> Any:
    for line in (tmp_path / "out" / f"{column}.log").read_text(encoding="utf-8").splitlines():
        if line.startswith(word):
            return json.loads(line.removeprefix(word))
    raise AssertionError(f"{column}.log has no line that starts with {word}")


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


def test_equal_losses_and_less_memory_are_reported(tmp_path: Path) -> None:
    status, report = compare_here(tmp_path, training(tmp_path))
    stock, ours = report["columns"]["stock"], report["columns"]["memascend"]
    assert status == 0
    assert report["losses_equal"]
    assert stock["losses"] == ours["losses"] == ["4.125", "2.0", "1.0000000000000002"]
    assert abs(stock["rss_bytes_max"] - ours["rss_bytes_max"] - 64 * MIB) < 8 * MIB
    assert stock["step_time_s_mean"] == pytest.approx(0.1, abs=0.05)
    assert (tmp_path / "out" / "rss.png").read_bytes().startswith(b"\x89PNG")


def test_the_first_different_loss_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = "print('loss 9.5'); print('loss', 8.0 if is_off else 8.000000000000002)"
    status, report = compare_here(tmp_path, training(tmp_path, body))
    assert status == 1
    assert not report["losses_equal"]
    assert "first in loss 1: 8.0 and 8.000000000000002" in report["losses"]
    assert "first in loss 1" in " ".join(capsys.readouterr().out.split())


def test_a_missing_loss_is_a_difference(tmp_path: Path) -> None:
    status, report = compare_here(tmp_path, training(tmp_path, "if is_off: print('loss 9.5')"))
    assert status == 1
    assert not report["losses_equal"]


def test_without_matplotlib_all_but_the_picture_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, _ = compare_here(tmp_path, training(tmp_path))
    assert status == 0
    assert "pip install 'memascend[plot]'" in capsys.readouterr().out
    assert not (tmp_path / "out" / "rss.png").exists()


def test_a_failed_run_shows_the_end_of_its_log_and_the_others_still_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = "if is_off: sys.exit('Not enough buffers 0 for swapping 1')"
    status, report = compare_here(tmp_path, training(tmp_path, body))
    assert status == 1
    assert report["columns"]["stock"]["problem"] == "exit status 1"
    assert not report["columns"]["memascend"]["problem"]
    assert "Not enough buffers 0 for swapping 1" in capsys.readouterr().out


def test_a_run_killed_by_a_signal_is_named_so(tmp_path: Path) -> None:
    body = "if is_off: os.kill(os.getpid(), 9)"
    _, report = compare_here(tmp_path, training(tmp_path, body))
    assert report["columns"]["stock"]["problem"] == "exit status -9 (SIGKILL)"


def test_a_command_that_does_not_exist_is_a_problem_not_a_traceback(tmp_path: Path) -> None:
    status, report = compare_here(tmp_path, [str(tmp_path / "missing")])
    assert status == 1
    assert "No such file" in report["columns"]["stock"]["problem"]


def test_a_plugin_that_stayed_silent_fails_the_comparison(tmp_path: Path) -> None:
    status, report = compare_here(tmp_path, [sys.executable, "-c", "print('loss 1.0')"])
    assert status == 1
    assert "memascend doctor" in report["columns"]["memascend"]["problem"]


def test_stock_runs_with_memascend_off_and_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMASCEND_CONFIG", '{"overflow_check": {"enabled": false}}')
    compare_here(tmp_path, training(tmp_path), "--tuned")
    stock = logged(tmp_path, "stock", "environment")
    tuned = logged(tmp_path, "stock-tuned", "environment")
    assert stock["MEMASCEND_DISABLE"] == tuned["MEMASCEND_DISABLE"] == "1"
    assert "MEMASCEND_CONFIG" not in stock
    assert tuned["DS_PIN_MEMORY_BACKEND"] == "native"
    assert tuned["PYTORCH_ALLOC_CONF"] == "pinned_max_round_threshold_mb:1"
    assert "DS_PIN_MEMORY_BACKEND" not in stock


def test_the_callers_own_block_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = '{"overflow_check": {"enabled": false}}'
    monkeypatch.setenv("MEMASCEND_CONFIG", block)
    monkeypatch.setenv("MEMASCEND_DISABLE", "1")
    compare_here(tmp_path, training(tmp_path))
    ours = logged(tmp_path, "memascend", "environment")
    assert ours["MEMASCEND_CONFIG"] == block
    assert "MEMASCEND_DISABLE" not in ours


@pytest.mark.parametrize("option", [["--deepspeed", "{}"], ["--deepspeed_config={}"]])
@pytest.mark.parametrize("has_block", [True, False])
def test_only_a_config_without_a_block_is_given_one(
    tmp_path: Path, option: list[str], has_block: bool
) -> None:
    content: dict[str, Any] = {"zero_optimization": {"stage": 3}}
    if has_block:
        content["memascend"] = {}
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(content), encoding="utf-8")
    arguments = [word.format(config) for word in option]
    compare_here(tmp_path, [*training(tmp_path), *arguments])
    ours = logged(tmp_path, "memascend", "environment")
    assert ours.get("MEMASCEND_CONFIG") == (None if has_block else "{}")
    assert logged(tmp_path, "memascend", "arguments") == arguments


def test_offload_folders_come_from_the_config_unless_an_option_names_one(tmp_path: Path) -> None:
    offload = {"device": "nvme", "nvme_path": "swap"}
    config = tmp_path / "ds.json"
    zero = {"offload_param": offload, "offload_optimizer": offload}
    config.write_text(json.dumps({"zero_optimization": zero}), encoding="utf-8")
    command = ["train.py", "--deepspeed", str(config)]
    assert compare.read_target(command).folders == (Path("swap"),)
    assert compare.read_target([*command, "--nvme-path", "/ssd"]).folders == (Path("/ssd"),)
    assert compare.read_target([*command, "--nvme-path=/ssd"]).folders == (Path("/ssd"),)
    assert compare.read_target(command, Path("/mine")).folders == (Path("/mine"),)
    assert compare.read_target(["train.py"]).folders == ()


def test_disk_use_is_measured_where_the_run_offloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "DISK_INTERVAL_S", 0.1)
    swap = tmp_path / "swap"
    swap.mkdir()
    (swap / "leftover").write_bytes(b"x" * 8 * MIB)
    time.sleep(0.05)
    body = f"open({str(swap)!r} + '/new', 'wb').write(b'x' * (4 << 20)); time.sleep(1.2)"
    _, report = compare_here(
        tmp_path, training(tmp_path, body), "--columns", "memascend", "--nvme-path", str(swap)
    )
    assert report["columns"]["memascend"]["disk_bytes_max"] == 4 * MIB


def test_without_libaio_stock_is_left_out_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = WarmUp(baseline_bytes=MIB, unavailable={"AsyncIOBuilder": "no libaio.h"})
    monkeypatch.setattr(compare, "warm_up", lambda log, on_news: found)
    out = tmp_path / "out"
    command = ["compare", "--out", str(out), "--tuned", "--", *training(tmp_path)]
    assert main(command) == 0
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert list(report["columns"]) == ["memascend"]
    assert set(report["skipped"]) == {"stock", "stock-tuned"}
    assert "no libaio.h" in capsys.readouterr().out


def test_an_unknown_column_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["compare", "--columns", "stcok", "--", "true"])
    assert caught.value.code == 2


def test_an_interrupted_run_leaves_no_process_behind(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c',"
        " 'import time; time.sleep(60)']); print(child.pid, flush=True); child.wait()"
    )
    pids: list[int] = []

    def interrupt(run: Run, line: str) -> None:
        pids.append(int(line))
        raise KeyboardInterrupt

    column: Column = columns_by_name(config_has_block=True)["stock"]
    with pytest.raises(KeyboardInterrupt):
        run_column(
            column,
            [sys.executable, "-c", script],
            log=tmp_path / "log",
            folders=[],
            interval_s=0.05,
            on_line=interrupt,
        )
    assert pids
    assert not psutil.pid_exists(pids[0]) or psutil.Process(pids[0]).status() == "zombie"
