"""The showcase: it looks at the machine before it trains, and prints plan and measurement."""

from __future__ import annotations

import json
import re
from collections import namedtuple
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from memascend.cli import plan_drive
from memascend.cli.compare import command as compare
from memascend.cli.compare.report import Report
from memascend.cli.compare.warm_up import WarmUp
from memascend.ledger.trace import PHASES
from memascend.volumes.kept import KeptRates
from tests.support.scripts import load_script

#: A model of a few million parameters.
TINY = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def showcase() -> ModuleType:
    return load_script("showcase")


@pytest.fixture(autouse=True)
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the measurement of the drive, which tests/cli/test_plan_drive.py has."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(plan_drive, "measure", lambda path: KeptRates(2.0, 0.5, 0.75))


def options(folder: Path, *more: str) -> list[str]:
    return ["--out", str(folder / "out"), "--nvme-path", str(folder / "swap"), *more]


def tiny(folder: Path) -> list[str]:
    path = folder / "config.json"
    path.write_text(json.dumps(TINY), encoding="utf-8")
    return ["--model", str(path), "--layers", "2"]


def test_a_full_drive_or_little_memory_is_said_before_anything_starts(
    showcase: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    usage = Usage(1 << 40, 0, 1 << 30)
    monkeypatch.setattr(showcase.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(showcase, "train", lambda args, files: pytest.fail("it has started"))
    assert showcase.main(options(tmp_path)) == 1
    printed = capsys.readouterr()
    assert "Llama-3.2-3B: 3,212,749,824 parameters" in printed.out
    assert "41.89 GiB of 1.00 GiB free in" in printed.out
    assert "40.89 GiB too little" in printed.out
    assert "not started: too little drive" in printed.err
    assert "--nvme-path" in printed.err


def test_an_unknown_model_is_a_usage_error(
    showcase: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert showcase.main(options(tmp_path, "--model", "Llama-3.2-3C")) == 2
    assert "Did you mean 'Llama-3.2-3B'" in capsys.readouterr().err


@pytest.mark.deepspeed
@pytest.mark.full
def test_a_toy_trains_and_its_run_is_shown_from_inside(
    showcase: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("MEMASCEND_CONFIG", raising=False)
    monkeypatch.setattr(compare, "show_warm_up", lambda console, out: WarmUp())
    pages: list[Report] = []
    monkeypatch.setattr(compare, "write_page", lambda report, path: pages.append(report))
    status = showcase.main(options(tmp_path, *tiny(tmp_path), "--steps", "3"))
    [run] = pages[0].runs
    assert status == 0, run.problem
    # The account: an embedding, two layers of attention, MLP and norms, a norm.
    parameters = 4096 * 256 + 2 * (256 * (256 * 2 + 128 * 2) + 3 * 256 * 2048 + 2 * 256) + 256
    printed = capsys.readouterr().out
    assert f"{parameters:,} parameters" in printed
    rows = {cells[0]: cells[1:] for cells in (re.split(r" {2,}", x) for x in printed.splitlines())}
    assert [len(rows[name]) for name in ("memascend's memory", "on the drive")] == [2, 2]
    assert rows["stock, tuned"][1] == "not run"
    ledger = json.loads((tmp_path / "out" / "ledger.json").read_text())
    assert 0 < ledger["held_bytes_peak"] < run.peaks.pss_bytes
    # The run, as its trace has it.
    recording = run.recording
    assert recording.step_count == len(run.losses) == 3
    phases = [mark.phase for mark in recording.marks if mark.phase in PHASES]
    assert phases[:7] == [*PHASES, *PHASES[:3]]
    last: Any = recording.marks[-1].measures
    assert last.read_bytes > 0
    assert last.written_bytes > 0
    assert {"optimizer tiles", "staging slots"} <= set(last.components)
    assert {row["component"] for row in recording.ledger["rows"]} >= set(last.components)
    elapsed_s = recording.marks[-1].time_s - recording.marks[0].time_s
    assert 0 < last.drive_wait_s < elapsed_s
    assert last.device_wait_s == 0  # the CPU
    assert list((tmp_path / "swap").iterdir()) == []
