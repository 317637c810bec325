"""Decisions while DeepSpeed constructs an optimizer: keys that are ignored, and advice."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from memascend.config.block import parse_block
from memascend.config.deepspeed import parse_deepspeed
from memascend.deepspeed.optimizer import construction
from memascend.deepspeed.optimizer.construction import Construction
from memascend.deepspeed.optimizer.upstream import Upstream
from memascend.plan.derive import PlanRequest, derive
from tests.support.plan_models import decoder


@pytest.mark.parametrize(("rank", "count"), [(0, 1), (1, 0)])
@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("offload_optimizer", "fast_init", True), ("offload_param", "max_in_cpu", 10**6)],
)
def test_a_stated_key_that_is_ignored_is_warned_of_on_rank_0(
    section: str,
    key: str,
    value: object,
    rank: int,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage3 = SimpleNamespace(
        params_in_nvme_and_cpu=True,
        offload_optimizer_fast_init=key == "fast_init",
        max_params_in_cpu=10**6,
    )
    made = Construction(
        Upstream(stage3),
        parse_block({"host_memory_limit": "1GiB"}),
        parse_deepspeed({"zero_optimization": {section: {key: value}}}),
    )
    monkeypatch.setattr(construction.dist, "get_rank", lambda: rank)
    # As a script without logging leaves it: INFO is not shown.
    with caplog.at_level(logging.WARNING, logger="memascend"):
        made.decide_offloading()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * count
    assert caplog.text.count(f"zero_optimization.{section}.{key} is ignored") == count
    assert stage3.offload_optimizer_fast_init is False
    assert stage3.max_params_in_cpu == 0


def attachment_of(new_event: Any, left_bytes: int | None = None) -> Any:
    return SimpleNamespace(
        runtime=SimpleNamespace(new_event=new_event), endurance_left_bytes=lambda: left_bytes
    )


@pytest.mark.parametrize(
    ("new_event", "allocator", "is_for_nothing"),
    [
        (None, {}, True),
        (torch.cuda.Event, {}, False),  # a device copies
        (None, {"page_lock": True}, False),  # the block says it, not DeepSpeed's key
        (None, {"enabled": False}, False),
    ],
)
def test_memory_that_the_json_locks_for_no_device_is_said(
    new_event: Any, allocator: dict[str, Any], is_for_nothing: bool
) -> None:
    zero = {"stage": 3, "offload_param": {"device": "nvme", "pin_memory": True}}
    made = Construction(
        Upstream(SimpleNamespace(module=torch.nn.Linear(8, 8))),
        parse_block({"allocator": allocator}),
        parse_deepspeed({"zero_optimization": zero}),
    )
    attachment = attachment_of(new_event)
    made._attachment = attachment
    lines = made.advice(derive(decoder(), request=PlanRequest()))
    assert "host_memory_limit" in lines[0]
    assert any("pin_memory locks" in line for line in lines) == is_for_nothing


@pytest.mark.parametrize("steps", [1, 4])
def test_a_run_that_accumulates_logs_what_one_pass_would_save(steps: int) -> None:
    made = Construction(
        Upstream(SimpleNamespace(module=torch.nn.Linear(1024, 1024))),
        parse_block({"micro_batches": {"count": 2}}),
        parse_deepspeed({"train_micro_batch_size_per_gpu": 2}),
    )
    attachment = attachment_of(None)
    made._attachment = attachment
    plan = derive(decoder(), request=PlanRequest(gradient_accumulation_steps=steps))
    lines = [line for line in made.advice(plan) if line.startswith("accumulation over 4 micro-")]
    assert len(lines) == (steps > 1)
    for line in lines:
        assert "train_micro_batch_size_per_gpu to 8 " in line
        assert '{"micro_batches": {"count": 8}}' in line


def test_a_run_logs_at_its_start_how_much_its_steps_write(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Construction(
        Upstream(SimpleNamespace(module=torch.nn.Linear(1024, 1024))),
        parse_block({}),
        parse_deepspeed({}),
    )
    made._attachment = attachment_of(None, left_bytes=10**15)
    monkeypatch.setattr(construction, "local_world_size", lambda: 2)
    plan = derive(decoder(), request=PlanRequest())
    (line,) = (line for line in made.advice(plan) if line.startswith("1000 steps write"))
    written = 2 * 1000 * sum(plan.written_bytes.values())
    assert f"{written / 1e12:.3g} TB" in line
    assert f"{written / 1e15:.2%} of the 1,000 TB that the drives' own SMART data leaves" in line


@pytest.mark.parametrize(("rank", "use_muon", "count"), [(0, True, 1), (1, True, 0), (0, False, 0)])
def test_clipping_of_muons_updates_is_warned_of_on_rank_0(
    rank: int,
    use_muon: bool,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    made = Construction(
        Upstream(SimpleNamespace(use_muon=use_muon, module=module)),
        parse_block({}),
        parse_deepspeed({"optimizer": {"type": "Muon"}, "gradient_clipping": 1.0}),
    )
    monkeypatch.setattr(construction.dist, "get_rank", lambda: rank)
    with caplog.at_level(logging.WARNING, logger="memascend"):
        made.open_streams(streams_gradients=False, is_tiled=False)
    assert caplog.text.count("the norm of Muon's updates is about 11 for this model") == count
