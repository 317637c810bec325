"""`memascend plan`: what it takes, what it prints, and that it runs where torch does not exist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memascend.base.units import GIB
from memascend.cli.main import main
from memascend.config import installed
from memascend.config.installed import KEPT_POWERS
from memascend.plan.shapes import builtin_names
from tests.support.planned import as_json
from tests.support.without_torch import printed_without_torch

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def test_the_accounts_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "Llama-3.1-8B", "--verbose"]) == 0
    printed = capsys.readouterr().out
    parts = (
        "stock 0.19.8", "tuned stock", "four pieces", "memascend", "8.03 billion", "flat gradients",
        "optimizer tiles", "40.47 GiB", "55.43 GiB", "856.02 MiB", "97 %", "read per step",
        "drive time of a step", "bf16, AdamW, sub_group_size 1e9", "largest tensor",
    )  # fmt: skip
    assert [part for part in parts if part not in printed.replace("\n", " ")] == []


def test_the_json_has_every_byte_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "qwen2.5-7b", "--drive-read", "7", "--drive-write", "4")
    assert found["parameters"] == 7615616512
    for name in ("stock", "tuned_stock", "four_pieces", "memascend"):
        account = found[name]
        assert account["host_bytes"] == sum(account["host"].values())
        assert account["drive_bytes"] == sum(account["drive"].values())
        assert account["step_seconds"] > 0
    assert found["memascend"]["request"]["precision"] == "bf16"


def test_a_checkpoint_of_packed_weights_alone_has_a_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    header = json.dumps({"w": {"dtype": "U8", "shape": [4096], "data_offsets": [0, 4096]}}).encode()
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4096))
    assert as_json(capsys, str(weights))["memascend"]["drive"]["parameters"] == 4096
    assert main(["plan", str(weights)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 tensor(s) that are not floats (4.00 KiB) are assumed to be frozen" in printed


def test_a_model_may_be_a_config_a_folder_or_safetensors(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "[tiny]"
    folder.mkdir()
    config = folder / "config.json"
    config.write_text(json.dumps(CONFIG))
    header = json.dumps({"w": {"dtype": "BF16", "shape": [8], "data_offsets": [0, 16]}}).encode()
    weights = folder / "model.safetensors"
    weights.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    exact = as_json(capsys, str(config))["parameters"]
    assert as_json(capsys, str(folder))["parameters"] == exact
    assert as_json(capsys, str(weights))["parameters"] == 8
    config.write_text(json.dumps({"model_type": "no-such-model"}))
    assert as_json(capsys, str(folder))["parameters"] == 8
    assert main(["plan", str(folder)]) == 0
    assert "[tiny]: 0.00 billion" in capsys.readouterr().out
    weights.unlink()
    assert main(["plan", str(folder)]) == 1
    assert '"no-such-model"' in capsys.readouterr().err


def test_a_configuration_decides_what_is_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ds_config = json.loads((ROOT / "configs" / "nvme_gpu.json").read_text())
    ds_config["fp16"] = {"enabled": True}
    del ds_config["bf16"]
    ds_config["memascend"] = {"streaming": {"optimizer": {"tile_bytes": "1MiB"}}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ds_config))
    found = as_json(capsys, "Llama-3.1-8B", "--config", str(path), "--world", "2")
    assert found["memascend"]["tile_numel"] == 1 << 18
    assert found["memascend"]["request"]["precision"] == "fp16"
    assert "J overflow check" in found["stock"]["host_step"]


def test_machines_that_cannot_be_named_the_nearest_number_of_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "Llama-3.1-8B", "--world", "7", "--nodes", "4"])
    assert "--world 8" in capsys.readouterr().err


@pytest.mark.parametrize("limit", ["2GiB", str(2 * GIB)])
def test_a_limit_is_kept(capsys: pytest.CaptureFixture[str], limit: str) -> None:
    found = as_json(capsys, "Llama-3.1-8B", "--limit", limit)["memascend"]
    assert 2 * GIB - 4096 < found["host_bytes"] <= 2 * GIB
    assert found["host"]["resident cache"] > 0


def test_a_limit_may_be_a_fraction_of_what_is_available(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memascend.cli.plan_accounts.memory_total", lambda: 8 * GIB)
    found = as_json(capsys, "Llama-3.1-8B", "--limit", "0.25")["memascend"]
    assert found["limit_bytes"] == 2 * GIB


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Llama-3.1-8B", "--limit", "1MiB"], "at least"),
        (["Llama-3.1-8B", "--limit", "much"], "--limit: 'much' is not allowed: not a byte count"),
        (["Llama-3.1-8B", "--limit", "1.5"], "fraction"),
        (["Llama-9"], "Did you mean"),
        (["Llama-3.1-8B", "--config", "missing.json"], "cannot read --config"),
    ],
)
def test_what_cannot_be_planned_is_exit_1(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["plan", *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{", "[]", '{"zero_optimization": {"stage": 1}}'])
def test_a_configuration_that_cannot_be_is_exit_1(tmp_path: Path, content: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(content)
    assert main(["plan", "Llama-3.1-8B", "--config", str(path)]) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["Llama-3.1-8B", "--table"],
        ["Llama-3.1-8B", "--world", "0"],
        ["Llama-3.1-8B", "--world", "6", "--nodes", "4"],
        ["Llama-3.1-8B", "--speed", "1"],
    ],
)
def test_a_mistake_in_the_command_line_is_exit_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", *arguments])
    assert caught.value.code == 2
    assert "invalid _" not in capsys.readouterr().err  # argparse names the function, not a range


def test_the_table_has_every_model_and_stands_in_the_documents(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "--table"]) == 0
    printed = capsys.readouterr().out.strip()
    assert len(printed.splitlines()) == 2 + len(builtin_names())
    assert printed in (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")


def test_it_runs_where_neither_torch_nor_deepspeed_exists() -> None:
    assert "optimizer tiles" in printed_without_torch(
        "from memascend.cli.main import main",
        "sys.exit(main(['plan', 'Llama-3.1-70B', '--limit', '2GiB']))",
    )


def written(tmp_path: Path, content: dict[str, Any]) -> str:
    path = tmp_path / "ds.json"
    nvme = {"device": "nvme", "nvme_path": "/mnt"}
    zero = {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}
    path.write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": True}} | content))
    return str(path)


def test_what_a_run_refuses_is_refused_here(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    config = written(tmp_path, {"zero_optimization": zero})
    assert main(["plan", "Llama-3.1-8B", "--config", config, "--limit", "6GiB"]) == 1
    assert 'offload_optimizer.device is "cpu"' in capsys.readouterr().err


def test_states_in_bf16_are_planned_and_need_adam(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    block = {"memascend": {"streaming": {"optimizer": {"state_dtype": "bf16"}}}}
    found = as_json(capsys, "Llama-3.1-8B", "--config", written(tmp_path, block))
    drive = found["memascend"]["drive"]
    assert drive["optimizer state"] == 2 * drive["master weights"] == 4 * found["parameters"]
    assert found["memascend"]["request"]["state_dtype"] == "bf16"
    config = written(tmp_path, block | {"optimizer": {"type": "Lion"}})
    assert main(["plan", "Llama-3.1-8B", "--config", config]) == 1
    message = capsys.readouterr().err
    assert "state_dtype" in message
    assert "Lion" in message


def test_settings_that_need_another_release_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(installed, "is_able", lambda ability: ability is not KEPT_POWERS)
    for section, status in ({"fused": False}, 1), ({}, 0):
        block = {"memascend": {"streaming": {"optimizer": section}}}
        config = written(tmp_path, block)
        assert main(["plan", "Llama-3.1-8B", "--config", config]) == status
    assert "since streaming.optimizer.fused is false" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("block", "note"),
    [
        ({"enabled": False}, "memascend.enabled is false: a run would use stock DeepSpeed"),
        ({"buffer_pool": {"enabled": False}}, "this JSON turns off: buffer_pool"),
        ({"streaming": {"optimizer": {"state_dtype": "bf16"}}}, "inexact: "),
        (
            {"streaming": {"optimizer": {"during_backward": True, "fused": False}}},
            "streaming.optimizer.during_backward has no effect: it needs",
        ),
    ],
)
def test_a_block_that_does_less_is_pointed_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, block: dict[str, Any], note: str
) -> None:
    config = written(tmp_path, {"memascend": block})
    assert main(["plan", "Llama-3.1-8B", "--config", config]) == 0
    assert note in capsys.readouterr().out.replace("\n", " ")


def test_several_volumes_have_the_depth_of_as_many_drives(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = written(tmp_path, {"memascend": {"volumes": [f"/d{n}" for n in range(4)]}})
    found = as_json(capsys, "Llama-3.1-8B", "--config", config)["memascend"]
    one = as_json(capsys, "Llama-3.1-8B", "--config", written(tmp_path, {}))["memascend"]
    assert found["host"]["staging slots"] == 4 * one["host"]["staging slots"]
    assert (found["tile_count"], one["tile_count"]) == (9, 3)
    config = written(tmp_path, {"memascend": {"volumes": [f"/d{n}" for n in range(4)]}})
    for options, note in (
        ((), "prefetch keep 4 of 4 drives busy"),
        (("--world", "4", "--nodes", "2"), "prefetch keep 2 of 2 drives busy"),
        (("--limit", "950MiB"), "prefetch keep 2 of 4 drives busy for each rank: the limit has no"),
    ):
        assert main(["plan", "Llama-3.1-8B", "--verbose", "--config", config, *options]) == 0
        assert note in " ".join(capsys.readouterr().out.split())
    assert main(["plan", "Llama-3.1-8B", "--config", written(tmp_path, {})]) == 0
    assert "drives busy" not in capsys.readouterr().out


def test_steps_in_whole_sub_groups_are_pointed_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = written(tmp_path, {"torch_autocast": {"enabled": True}, "memascend": {}})
    assert main(["plan", "Llama-3.1-8B", "--config", config]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "streaming.optimizer is not used: torch_autocast" in text
    assert main(["plan", "Llama-3.1-8B", "--config", config, "--limit", "6GiB"]) == 1
    assert "cannot be kept" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--json"], ["--plot", "bars.png"]])
def test_the_table_of_all_models_is_printed_and_nothing_else(
    capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", "--table", *option])
    assert caught.value.code == 2
    assert "--json and --plot need MODEL" in capsys.readouterr().err
