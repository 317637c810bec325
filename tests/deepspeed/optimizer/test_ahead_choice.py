"""Steps during backward that a block asks for, and reasons against them: Muon's most of all."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from memascend.deepspeed.optimizer.ahead import AfterBackward, DuringBackward
from memascend.deepspeed.optimizer.muon import MuonUpdates
from tests.support.early_muon import make
from tests.support.early_optimizer import make as make_adam

pytestmark = pytest.mark.deepspeed


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 0)
    monkeypatch.setattr("deepspeed.comm.get_world_size", lambda *group: 1)


def test_the_block_decides_first(caplog: pytest.LogCaptureFixture) -> None:
    for make_one, after in ((make_adam, AfterBackward), (make, MuonUpdates)):
        assert isinstance(make_one(early=True).steps._ahead, DuringBackward)
        assert isinstance(make_one(early=False).steps._ahead, after)
    assert not caplog.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clip_grad": 1.0}, "with gradient_clipping"),
        ({"block": {"state_dtype": "int8"}}, 'with state_dtype "int8"'),
        ({"block": {"fused": False}}, "does not step in one pass"),
    ],
)
def test_steps_that_cannot_begin_during_backward_are_named(
    changes: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "memascend"):
        optimizer = make(**changes)
    assert isinstance(optimizer.steps._ahead, MuonUpdates)
    assert words in caplog.text


def test_several_ranks_and_auto_stay_after_backward(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "memascend"):
        assert isinstance(make(early="auto").steps._ahead, MuonUpdates)
        assert not caplog.text
        monkeypatch.setattr("deepspeed.comm.get_world_size", lambda *group: 2)
        assert isinstance(make().steps._ahead, MuonUpdates)
    assert "several ranks make Muon's updates together" in caplog.text
