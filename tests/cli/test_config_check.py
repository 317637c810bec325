"""A DeepSpeed JSON before a run: what the run would refuse, and clipping of Muon's updates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memascend.cli import doctor
from memascend.cli.config_check import check_file, volumes_in
from memascend.cli.main import main
from memascend.config import installed


def check(ds_config: dict[str, Any], folder: Path) -> tuple[str, str, str]:
    file = folder / "ds.json"
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/mnt"}}
    rest = {"zero_optimization": zero, "bf16": {"enabled": True}, "memascend": {}}
    file.write_text(json.dumps(rest | ds_config))
    return check_file(file)


@pytest.mark.parametrize(("clipping", "state"), [(1.0, "note"), ("auto", "note"), (0, "ok")])
def test_clipping_of_muons_updates_is_noted(tmp_path: Path, clipping: object, state: str) -> None:
    ds_config = {"optimizer": {"type": "Muon"}, "gradient_clipping": clipping}
    found, text, remedy = check(ds_config, tmp_path)
    assert found == state
    if state == "note":
        assert "norm of Muon's updates" in text
        assert remedy.startswith("Set it to 0")


@pytest.mark.parametrize(
    ("ds_config", "words"),
    [
        ({"memascend": {"host_memory_limits": 1}}, "host_memory_limits"),
        ({"zero_optimization": {"stage": 2}}, "stage is 2"),
        ({"memascend": {"report": "/nosuch/report.json"}}, "memascend.report"),
        (
            {
                "memascend": {"streaming": {"optimizer": {"state_dtype": "int8"}}},
                "optimizer": {"type": "Lion"},
            },
            "needs DeepSpeedCPUAdam",
        ),
        (
            {"memascend": {"host_memory_limit": "2GiB"}, "torch_autocast": {"enabled": True}},
            "cannot be kept",
        ),
    ],
)
def test_a_config_that_a_run_refuses_is_a_problem(
    tmp_path: Path, ds_config: dict[str, Any], words: str
) -> None:
    state, text, remedy = check(ds_config, tmp_path)
    assert state == "problem"
    assert words in text
    assert "ds.json" in remedy


@pytest.mark.parametrize(
    ("block", "state", "words"),
    [
        ({"micro_batches": {"count": 2}}, "problem", "micro_batches needs DeepSpeed 0.18.5"),
        ({"streaming": {"optimizer": {"fused": False}}}, "note", "needs DeepSpeed 0.19.0"),
        ({}, "ok", "no setting is refused"),
    ],
)
def test_settings_that_need_another_release_are_named_with_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    block: dict[str, Any],
    state: str,
    words: str,
) -> None:
    monkeypatch.setattr(installed, "is_able", lambda ability: False)
    found, text, _ = check({"memascend": block}, tmp_path)
    assert (found, words in text) == (state, True)


@pytest.mark.parametrize("block", [{}, {"memascend": {"enabled": False}}])
def test_a_config_without_memascend_is_refused_nothing(
    tmp_path: Path, block: dict[str, Any]
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}} | block))
    state, text, _ = check_file(file)
    assert state == "note"
    assert "no block turns memascend on" in text


def test_the_doctor_checks_a_config_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda path: [])
    assert main(["doctor", "--json", "--config", str(tmp_path / "none.json")]) == 1
    (row,) = json.loads(capsys.readouterr().out)["checks"]
    assert (row["name"], row["state"]) == ("config", "problem")
    assert "none.json" in row["found"]
    assert main(["doctor", "--json"]) == 0


@pytest.mark.parametrize(
    ("halves", "state"),
    [
        ({"bf16": {"enabled": False}}, "note"),
        ({"bf16": {"enabled": "auto"}}, "ok"),
        ({"bf16": {}, "fp16": {"enabled": True}}, "ok"),
        ({"bf16": {}, "torch_autocast": {"enabled": True}}, "ok"),
    ],
)
def test_weights_of_four_bytes_are_noted(
    tmp_path: Path, halves: dict[str, Any], state: str
) -> None:
    found, text, remedy = check(halves, tmp_path)
    assert found == state
    assert (
        ("twice the bytes" in text) == ('"bf16": {"enabled": true}' in remedy) == (state == "note")
    )


def test_the_drive_that_a_config_names_is_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    monkeypatch.setattr(doctor, "examine", lambda found: tried.extend(v.path for v in found) or [])
    check({}, tmp_path)  # writes the file
    for options in ([], ["--config", str(tmp_path / "ds.json")], ["--path", str(tmp_path)]):
        main(["doctor", "--json", *options])
    assert tried == [".", "/mnt", str(tmp_path)]
    assert volumes_in(tmp_path / "nosuch.json") == ()


def test_each_volume_is_tried_and_its_remedy_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = [{"path": path, "raw": True} for path in ("/etc/hostname", "/dev/nosuch")]
    volumes = [str(tmp_path), str(tmp_path / "new"), "/etc/hosts", "/dev/null", *raw]
    check({"memascend": {"volumes": volumes}}, tmp_path)  # writes the file
    assert main(["doctor", "--json", "--config", str(tmp_path / "ds.json")]) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [one["state"] for one in checks if one["name"] == "trial"] == ["ok"]
    fixes = [one["fix"] for one in checks if one["name"] == "path"]
    assert fixes == [
        f"mkdir -p {tmp_path / 'new'}",
        *['name a folder; a device needs "raw": true in memascend.volumes'] * 2,
    ]
    not_raw, missing = (one for one in checks if one["name"] == "raw volume")
    assert "it is not a block device" in not_raw["found"]
    assert "leave raw out for a directory" in not_raw["fix"]
    assert "No such file" in missing["found"]


def test_a_file_that_is_missing_is_not_to_be_changed(tmp_path: Path) -> None:
    assert check_file(tmp_path / "nosuch.json")[2] == "name a file that exists"
