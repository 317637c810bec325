"""The record of a framework's steps: exact numbers, of steps of the optimizer alone."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support.scripts import load_script


@pytest.fixture(scope="module")
def recorder() -> ModuleType:
    return load_script("frameworks/recorder/sitecustomize")


class Number(float):
    def detach(self) -> float:
        return self


class Engine:
    """An engine that makes a step of its optimizer at every second step."""

    def __init__(self) -> None:
        self.optimizer = SimpleNamespace()
        self.global_steps = self.micro_steps = 0

    def backward(self, loss: float, *, scale: int = 1) -> float:
        return loss * scale

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.micro_steps % 2 == 1

    def step(self) -> str:
        self.global_steps += self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        return "stepped"

    def get_global_grad_norm(self) -> float | None:
        return 0.5 if self.global_steps == 1 else None


def test_losses_and_norms_are_written_once_a_step_to_the_last_bit(
    recorder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(recorder.VARIABLE, str(tmp_path / "record"))
    initialize = recorder.watched(lambda engine: (engine, engine.optimizer))
    engine, _ = initialize(Engine())
    for loss in (0.1, 0.2, 0.3, 0.4):
        assert engine.backward(Number(loss), scale=2) == loss * 2
        assert engine.step() == "stepped"
    first, *steps = map(json.loads, (tmp_path / "record").read_text().splitlines())
    assert first == {"optimizer": "types.SimpleNamespace"}
    assert [row["step"] for row in steps] == [1, 2]
    assert [float.fromhex(loss) for row in steps for loss in row["losses"]] == [0.1, 0.2, 0.3, 0.4]
    assert [row["norm"] for row in steps] == [(0.5).hex(), "none"]


def test_an_engine_without_an_optimizer_is_left_alone(recorder: ModuleType) -> None:
    made: tuple[Any, None] = (Engine(), None)
    recorder.watched(lambda: made)()
    assert "step" not in vars(made[0])
