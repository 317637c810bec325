"""Whether Muon's updates are applied as they are made: settings, places, and drive space."""

from __future__ import annotations

import errno
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from memascend.config.block import parse_block
from memascend.deepspeed.optimizer import applying
from memascend.deepspeed.optimizer.applying import Applying
from memascend.errors import StoreFullError
from memascend.nvme.resident import ResidentStore
from memascend.plan.optimizers import MOMENTUM
from memascend.streaming.optimizer.sub_group import Member
from tests.support.tiled_training import SIZES, Training

NAME, NUMEL = "4_4", SIZES["4_4"]
NUMBERS = {NAME: 0}


class Setting:
    """A sub-group with momentum, all of whose values are on the drive."""

    def __init__(self, *, fused: bool = True, has_store: bool = True, **changes: Any) -> None:
        self.training = training = Training(lambda params: torch.optim.SGD(params, lr=1.0))
        self.hyperparameters: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.0}
        self.group = training.groups.group(NAME)
        self.group.apart = frozenset({MOMENTUM})
        training.groups.add_state(NAME, MOMENTUM, torch.bfloat16, 0.0)
        training.groups.settle()
        self.group.fills.clear()
        training.store.reserve(key="param", nbytes=2 * NUMEL)
        self.members = [Member(0, NUMEL, torch.bfloat16, key="param")]
        self.store = ResidentStore(training.store, stream_of=lambda key: None)
        upstream: Any = SimpleNamespace(
            norm_max=0.0,
            dtype=torch.bfloat16,
            loss_scale=1.0,
            members=lambda number: self.members,
            base=training.optimizer,
            hyperparameters=lambda number: self.hyperparameters,
        )
        for name, value in changes.items():
            setattr(upstream, name, value)
        block = {"streaming": {"optimizer": {"fused": fused}}}
        runtime: Any = SimpleNamespace(
            store=self.store if has_store else None,
            optimizer=training.stream,
            config=parse_block(block),
            plan=None,
            drive=SimpleNamespace(free_bytes=lambda: None),
        )
        self.applying = Applying(upstream, runtime)

    @property
    def has_room(self) -> bool:
        return any(key.startswith("early.") for key in self.store.keys())  # noqa: SIM118


def test_a_sub_group_on_the_drive_may_and_has_room_from_then_on() -> None:
    setting = Setting()
    assert not setting.has_room
    assert setting.applying.choose(NUMBERS) == {NAME}
    assert setting.has_room
    setting.applying.settle(is_refused=False)
    assert setting.applying.values is not None
    setting.applying.discard()
    assert not setting.has_room


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_max": 1.0},
        {"dtype": torch.float16},
        {"loss_scale": 8.0},
        {"fused": False},
        {"has_store": False},
    ],
)
def test_nothing_is_asked_where_a_setting_forbids_it(changes: dict[str, Any]) -> None:
    setting = Setting(**changes)
    assert not setting.applying.is_wanted
    assert setting.applying.choose(NUMBERS) == set()
    setting.applying.discard()


def test_before_the_first_step_and_in_memory_it_may_not() -> None:
    setting = Setting()
    setting.group.fills[MOMENTUM] = 0.0
    assert setting.applying.choose(NUMBERS) == set()
    setting.group.fills.clear()
    setting.members = [Member(0, NUMEL, torch.bfloat16, tensor=torch.empty(NUMEL))]
    assert setting.applying.choose(NUMBERS) == set()
    assert setting.applying.is_wanted


def test_with_hooks_or_a_rate_that_may_change_it_may_not() -> None:
    setting = Setting()
    setting.hyperparameters["lr"] = torch.tensor(1.0)
    assert setting.applying.choose(NUMBERS) == set()
    setting.hyperparameters["lr"] = 1.0
    hook = setting.training.optimizer.register_step_pre_hook(lambda *arguments: None)
    assert setting.applying.choose(NUMBERS) == set()
    hook.remove()
    assert setting.applying.choose(NUMBERS) == {NAME}


def test_a_drive_without_room_is_told_once_and_asked_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    setting = Setting()

    def refuse(*, key: str, nbytes: int) -> None:
        raise StoreFullError(errno.ENOSPC, f"no room for {key}")

    monkeypatch.setattr(setting.store, "reserve", refuse)
    assert setting.applying.choose(NUMBERS) == set()
    setting.applying.settle(is_refused=False)
    assert setting.applying.values is None
    assert setting.applying.choose(NUMBERS) == set()
    assert setting.applying.is_wanted, "ranks still ask each other"
    assert caplog.text.count("no room for early.") == 1


def test_room_that_saving_needs_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting()
    monkeypatch.setattr(applying, "too_little_room", lambda runtime: "too little is left")
    assert setting.applying.choose(NUMBERS) == set()
    setting.applying.settle(is_refused=False)
    assert not setting.has_room


def test_room_is_given_back_where_another_rank_refuses() -> None:
    setting = Setting()
    setting.applying.choose(NUMBERS)
    setting.applying.settle(is_refused=True)
    assert not setting.has_room
