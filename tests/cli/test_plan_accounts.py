"""The accounts of `memascend plan`: a tuned stock, and options in place of the JSON's values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memascend.base.units import GIB
from memascend.cli.main import main
from tests.support.planned import as_json


def peak(account: dict[str, float]) -> float:
    return max(account["initialization_bytes"], account["step_bytes"])


def test_a_tuned_stock_needs_less_than_the_example_and_far_more_than_memascend(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = as_json(capsys, "Llama-3.1-8B")
    stock, tuned, ours = (peak(found[name]) for name in ("stock", "tuned_stock", "memascend"))
    assert [round(nbytes / GIB, 1) for nbytes in (stock, tuned)] == [55.4, 32.6]
    assert ours < 0.03 * tuned
    assert found["tuned_stock"]["host"]["B 16-bit cache"] == 0


def test_what_is_tuned_already_stays(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path), "pin_memory": False}
    param = {**nvme, "max_in_cpu": 0}
    zero = {"stage": 3, "sub_group_size": 10**7, "offload_param": param, "offload_optimizer": nvme}
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": True}}))
    found = as_json(capsys, "Llama-3.1-8B", "--config", str(config))
    assert found["tuned_stock"] == found["stock"]


NVME = {"device": "nvme", "nvme_path": "/mnt"}
ZERO = {"stage": 3, "offload_param": NVME, "offload_optimizer": NVME}


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({"aio": {"use_gds": True}}, "aio.use_gds cannot be combined with memascend"),
        ({"zero_optimization": {"stage": "auto"}}, 'zero_optimization.stage is "auto"'),
        ({"zero_optimization": {**ZERO, "offload_param": {"device": "nvme"}}}, "nvme_path is miss"),
    ],
)
def test_settings_that_a_run_refuses_are_not_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, keys: dict[str, Any], refused: str
) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"zero_optimization": ZERO, "memascend": {}} | keys))
    assert main(["plan", "Qwen3-0.6B", "--config", str(config)]) == 1
    assert refused in capsys.readouterr().err


def test_a_json_without_a_block_is_said_to_be_stocks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"zero_optimization": ZERO}))
    found = as_json(capsys, "Qwen3-0.6B", "--config", str(config))
    assert 'no "memascend": {}: a run would use stock DeepSpeed' in found["warnings"][0]


@pytest.mark.parametrize(
    ("limit", "reason"), [("-5GiB", "cannot be negative"), ("9999999TiB", "is too large")]
)
def test_a_limit_that_cannot_be_is_the_options(
    capsys: pytest.CaptureFixture[str], limit: str, reason: str
) -> None:
    assert main(["plan", "Qwen3-0.6B", f"--limit={limit}"]) == 1
    said = capsys.readouterr().err
    assert "memascend: --limit: " in said
    assert reason in said
