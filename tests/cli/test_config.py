"""`memascend config`: the JSON for this machine is accepted, and is that of the recipes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memascend.base.units import GIB, MIB
from memascend.cli import config
from memascend.cli.main import main
from memascend.config.block import active_config
from memascend.config.deepspeed import parse_deepspeed
from memascend.deepspeed.attach.refusals import check_config
from memascend.errors import ConfigError
from memascend.plan.request import PlanRequest
from memascend.system.gpus import Gpu
from tests.support.source_tree import ROOT


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "memory_total", lambda: 32 * GIB)
    monkeypatch.setattr(config, "list_gpus", list)
    monkeypatch.setattr(config, "filesystem_of", lambda path: "ext4")


def written(
    capsys: pytest.CaptureFixture[str], folder: Path, *options: str
) -> tuple[dict[str, object], str]:
    assert main(["config", "--nvme-path", str(folder), *options]) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


def test_the_trainers_json_is_that_of_the_recipes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found, said = written(capsys, tmp_path)
    recipe = json.loads((ROOT / "configs" / "recipes" / "trainer.json").read_text())
    for part in ("offload_param", "offload_optimizer"):
        recipe["zero_optimization"][part]["nvme_path"] = str(tmp_path)
    recipe["memascend"] = {"host_memory_limit": "16GiB"}
    assert found == recipe
    assert "host_memory_limit 16.00 GiB for each of 1 rank(s): 50% of 32.00 GiB; less" in said


def test_a_loop_gets_numbers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found, _ = written(capsys, tmp_path, "--for", "loop", "--ranks", "2")
    assert '"auto"' not in json.dumps(found)
    assert found["memascend"] == {"host_memory_limit": "8GiB"}
    settings = parse_deepspeed(found)
    check_config(settings)
    request = PlanRequest.from_deepspeed(found)
    assert (request.precision, request.parameters_device) == ("bf16", "nvme")


def test_one_pass_keeps_checkpoints_in_a_third_of_the_smallest_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cards = [Gpu("one", 24564 * MIB, "1"), Gpu("another", 81559 * MIB, "1")]
    monkeypatch.setattr(config, "list_gpus", lambda: cards)
    found, said = written(capsys, tmp_path, "--one-pass", "2")
    assert found["memascend"] == {
        "host_memory_limit": "8GiB",
        "micro_batches": {"sequences": 2},
        "activations": {"enabled": True, "device_bytes": "8GiB"},
    }
    assert active_config(found) is not None
    check_config(parse_deepspeed(found))
    assert "one pass" not in said


def test_one_pass_without_a_gpu_sends_all_checkpoints_to_the_drive_and_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found, said = written(capsys, tmp_path, "--one-pass", "4", "--for", "loop")
    block = found["memascend"]
    assert isinstance(block, dict)
    assert block["activations"] == {"enabled": True}
    assert block["micro_batches"] == {"sequences": 4}
    assert "memascend.activations.device_bytes to a third of its memory" in said
    found, said = written(capsys, Path("@SWAP@"), "--one-pass", "4")
    assert found["memascend"] == block | {"host_memory_limit": 0.5}
    with pytest.raises(SystemExit, match="2"):
        main(["config", "--nvme-path", str(tmp_path), "--one-pass", "0"])
    assert "from 1 to 1048576, got 0" in capsys.readouterr().err


def test_a_jobs_folder_is_not_looked_for_and_its_nodes_memory_is_halved(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found, said = written(capsys, Path("@SWAP@"))
    job = json.loads((ROOT / "configs" / "recipes" / "trainer.json").read_text())
    for part in ("offload_param", "offload_optimizer"):
        job["zero_optimization"][part]["nvme_path"] = "@SWAP@"
    job["memascend"] = {"host_memory_limit": 0.5}
    assert (found, said) == (job, "")


@pytest.mark.parametrize(
    ("total_bytes", "ranks", "limit_bytes"),
    [
        (32 * GIB, 1, 16 * GIB),
        (33 * GIB, 1, 16 * GIB),
        (4 * GIB, 1, 1 * GIB),  # Python and torch leave no half
        (3 * GIB + 512 * MIB, 1, 512 * MIB),
        (1024 * GIB, 8, 64 * GIB),
    ],
)
def test_the_limit_leaves_half_and_what_python_takes(
    total_bytes: int, ranks: int, limit_bytes: int
) -> None:
    assert config.recommended_limit(total_bytes, ranks) == limit_bytes


def test_a_machine_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="too little for 8 rank"):
        config.recommended_limit(16 * GIB, 8)


def test_a_missing_folder_and_one_in_memory_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["config", "--nvme-path", str(tmp_path / "nosuch")]) == 1
    assert "mkdir -p" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["config", "--nvme-path", str(tmp_path / "file")]) == 1
    assert "mkdir" not in capsys.readouterr().err
    assert main(["config", "--nvme-path", "/proc"]) == 1  # root may write everywhere else
    assert "no file can be made there" in capsys.readouterr().err
    monkeypatch.setattr(config, "filesystem_of", lambda path: "tmpfs")
    assert main(["config", "--nvme-path", str(tmp_path)]) == 1
    assert "is on tmpfs, which is host memory" in capsys.readouterr().err
