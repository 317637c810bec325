"""Trains, and looks at a model in many ways while a walk is held; prints what each look saw.

Started by test_overlap.py. With overlap the walk of each step stops before the last layer's matrix
until a moment after a look has begun, or until a look is over that must not wait for it. Prints, as
JSON, by look: a digest of what it saw, the loss of the step behind it, and what came of the walk.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
)

import memascend  # noqa: F401  what the torch.backends entry point does in an installed copy
from tests.integration.overlap_program import PATIENCE_S, WIDTH, config, hold_walks
from tests.support.process_group import leave

LAYERS = 4
#: Long enough for a look to begin; where one is slower nothing fails.
MOMENT_S = 0.2


class UserError(Exception):
    """What the user's own code may raise."""


class Layer(torch.nn.Linear):
    """A matrix; the model's code fails at it when told to."""

    fails = False

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of the same shape."""
        if self.fails:
            raise UserError
        return rows + torch.tanh(super().forward(rows))


def digest(seen: Any) -> str:
    """A hash of all tensors of a nested object, and of how it is nested."""
    found = hashlib.sha256()

    def add(one: Any) -> None:
        if isinstance(one, torch.Tensor):
            one = one.detach().cpu().contiguous().view(-1)
            found.update(one.view(torch.uint8).numpy().tobytes() if one.numel() else b"")
        elif isinstance(one, Mapping):
            for key in one:
                found.update(str(key).encode())
                add(one[key])
        elif isinstance(one, (list, tuple)):
            for item in one:
                add(item)

    add(seen)
    return found.hexdigest()


class Training:
    """An engine whose walks can be held."""

    def __init__(self, drive: str, *, overlap: bool) -> None:
        settings = config(drive, {"streaming": {"optimizer": {"overlap": overlap}}})
        torch.manual_seed(0)
        with deepspeed.zero.Init(config_dict_or_path=settings, dtype=torch.bfloat16):
            self.layers = [Layer(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        model = torch.nn.Sequential(*self.layers)
        self.engine = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=settings
        )[0]
        self.last = self.layers[-1].weight
        self.walk = self.engine.optimizer.attachment.runtime.background

    def forward(self) -> Any:
        rows = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH).to(torch.bfloat16)
        return self.engine(rows).float().square().mean()

    def step(self) -> float:
        loss = self.forward()
        self.engine.backward(loss)
        self.engine.step()
        return float(loss)

    # -- looks -----------------------------------------------------------------------------------

    def evaluate(self) -> Any:
        self.engine.eval()
        with torch.no_grad():
            seen = self.forward()
        self.engine.train()
        return seen

    def gather(self) -> Any:
        with deepspeed.zero.GatheredParameters(self.last):
            return self.last.detach().clone()

    def fail(self) -> Any:
        self.layers[-2].fails = True  # behind it is the one that the walk is held at
        try:
            self.forward()
        except UserError:
            return "the user's own error"
        finally:
            self.layers[-2].fails = False

    @property
    def waiting(self) -> dict[str, Callable[[], Any]]:
        """Looks that see what the step has made, by name."""
        return {
            "evaluate": self.evaluate,
            "gather": self.gather,
            "state_dict": self.engine.optimizer.state_dict,
            "weight": lambda: safe_get_full_fp32_param(self.last),
            "state": lambda: safe_get_full_optimizer_state(self.last, "exp_avg_sq"),
        }

    @property
    def others(self) -> dict[str, Callable[[], Any]]:
        """Looks that have no use for what is held."""
        return {
            "zero_grad": self.engine.optimizer.zero_grad,
            "ledger": lambda: str(self.engine.memascend.ledger()) != "",
            "exception": self.fail,
            "weight of another": lambda: safe_get_full_fp32_param(self.layers[0].weight),
            "state of another": lambda: safe_get_full_optimizer_state(
                self.layers[0].weight, "exp_avg"
            ),
            "gradient of another": lambda: safe_get_full_grad(self.layers[0].weight),
        }


def looks(training: Training) -> dict[str, list[Any]]:
    """What each look sees behind a step, and whether the walk goes on behind it."""
    found, may_go = {}, threading.Event()

    def wait() -> None:  # without overlap a step is its caller's own
        if training.walk.is_under_way:
            assert may_go.wait(PATIENCE_S)

    hold_walks(training.last, wait)
    every = training.waiting | training.others | {"destroy": training.engine.destroy}
    for name, look in every.items():
        may_go.clear()
        loss = training.step()
        was_under_way = training.walk.is_under_way
        if name not in training.others:
            threading.Timer(MOMENT_S, may_go.set).start()
        seen = digest(look())
        goes_on = training.walk.is_under_way and not may_go.is_set()
        may_go.set()
        training.walk.finish()
        found[name] = [seen, loss, was_under_way, goes_on]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--no-overlap", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    with tempfile.TemporaryDirectory(dir=".") as drive:
        found = looks(Training(drive, overlap=not options.no_overlap))
    print(json.dumps(found))
    leave()


if __name__ == "__main__":
    main()
