"""Notes of `memascend plan`: warnings stand there always, the rest on request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memascend.base.units import TIB
from memascend.cli import plan_notes
from memascend.cli.main import main


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", "Llama-3.1-8B", *arguments]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_notes_are_for_who_asks(capsys: pytest.CaptureFixture[str]) -> None:
    short, long = printed(capsys), printed(capsys, "--verbose")
    assert "do not count Python" in long
    assert "do not count Python" not in short
    assert "--verbose: how these numbers were found" in short


@pytest.mark.parametrize("choice", [None, "auto", True, False])
def test_steps_that_may_begin_early_are_said_to_be_counted_after_backward(
    choice: object, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    content = {
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
        "bf16": {"enabled": True},
        "memascend": {"streaming": {"optimizer": {"during_backward": choice}}},
    }
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(content))
    found = printed(capsys, "--config", str(config), "--verbose", "--compute", "20", "40")
    is_tried = "bytes and seconds are those of steps after backward" in found
    assert is_tried == (choice in (None, "auto"))
    assert ("(184.4 s instead of 201.2 s)" in found) == is_tried


def test_a_setting_that_moves_more_is_a_warning(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}
    config = tmp_path / "ds.json"
    content = {"zero_optimization": zero, "bf16": {"enabled": True}, "gradient_clipping": 1.0}
    config.write_text(json.dumps(content | {"gradient_accumulation_steps": 4}))
    assert "! accumulation over 4 micro-steps moves" in printed(capsys, "--config", str(config))
    config.write_text(
        json.dumps(content | {"optimizer": {"type": "Muon", "params": {"torch_adam": True}}})
    )
    assert "! memascend's column is for steps in tiles" in printed(capsys, "--config", str(config))


def test_a_rank_with_more_in_a_volume_than_a_file_of_ext4_holds_is_told() -> None:
    assert plan_notes._note_of_files(32 * TIB, 2) == []
    (note,) = plan_notes._note_of_files(33 * TIB, 1)
    assert "33792.00 GiB" in note
    assert "name 3 directories" in note
