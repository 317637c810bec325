"""The accounts of `memascend plan`: a tuned stock, and options in place of the JSON's values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memascend.base.units import GIB
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
