"""Which streams serve, how many states are planned for, and what a stated limit refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from memascend.config.block import parse_block
from memascend.deepspeed.optimizer import choice as streams
from memascend.deepspeed.plan.optimizers import ELEMENTWISE, state_count
from memascend.errors import ConfigError


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(streams, "is_autocast_initialized", lambda: False)


def optimizer_of(**changes: Any) -> Any:
    facts = {"use_muon": False, "params_in_nvme_and_cpu": True, "partial_offload": 1.0}
    return SimpleNamespace(**facts | changes)


DECLINED = {"use_muon": True, "partial_offload": 0.5}


@pytest.mark.parametrize("name", DECLINED)
def test_a_stream_that_cannot_serve_is_named_and_left_out(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = streams.streams_in_use(parse_block({}), optimizer_of(**{name: DECLINED[name]}))
    assert not found.optimizer
    assert "streaming.optimizer is not used" in caplog.text


@pytest.mark.parametrize("name", DECLINED)
def test_a_limit_that_needs_it_is_refused(name: str) -> None:
    """Whole sub-groups and their copies would exceed it, some of them unseen."""
    config = parse_block({"host_memory_limit": "2GiB"})
    assert streams.streams_in_use(config, optimizer_of()).optimizer
    with pytest.raises(ConfigError, match=r"host_memory_limit='2GiB' cannot be kept: streaming\."):
        streams.streams_in_use(config, optimizer_of(**{name: DECLINED[name]}))


def steps_of(optimizer: torch.optim.Optimizer) -> int:
    """State tensors that an optimizer really makes."""
    parameter = optimizer.param_groups[0]["params"][0]
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return sum(
        isinstance(value, torch.Tensor) and value.shape == parameter.shape
        for value in optimizer.state[parameter].values()
    )


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in ELEMENTWISE if kind.__module__.startswith("torch.")),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
    ],
)
def test_as_many_states_are_planned_as_an_optimizer_makes(
    kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    """A state that was not planned takes memory in the first step."""
    optimizer = kind([torch.nn.Parameter(torch.ones(7))], lr=1e-3, **options)
    assert state_count(optimizer) == steps_of(optimizer)


def test_the_group_with_most_states_counts() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.ones(3))], "momentum": m} for m in (0.0, 0.9)]
    assert state_count(torch.optim.SGD(groups, lr=0.1)) == 1
