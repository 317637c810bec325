"""Calls an engine inside running backward passes, and compares its gradients with those of torch.

Started by test_retries.py. Prints, as JSON, by kind of gradients and by name of the case, the
largest difference of a gradient from that of torch alone, relative to its norm, in two steps: in
the second the gradients of the first must not show. For a case that is refused the error's name.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch._dynamo  # as checkpoints do, here: before what is imported is frozen
from deepspeed import comm
from deepspeed.utils import safe_get_full_grad
from torch.utils.checkpoint import checkpoint

import memascend.errors
from tests.integration.programs import BLOCK, training_config
from tests.support.process_group import leave, say

WIDTH, STEPS = 96, 2
Backward = Callable[[torch.Tensor], object]
Case = Callable[[Any, Backward, int], None]
CASES: dict[str, Case] = {}


class UserError(Exception):
    """What the script's own code may raise."""


class Towers(torch.nn.Module):
    """Two encoders, each of which may be used alone."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (
            torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)))
            for _ in range(2)
        )

    def forward(self, rows: torch.Tensor, tower: str = "") -> torch.Tensor:
        if tower:
            return torch.tanh(getattr(self, tower)(rows))
        return torch.tanh(self.right(self.left(rows)))


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def rows(number: int) -> torch.Tensor:
    seed = comm.get_world_size() * number + comm.get_rank()
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def loss_of(model: Any, number: int, tower: str = "") -> torch.Tensor:
    found: torch.Tensor = model(rows(number), tower).square().mean()
    return found


def with_hook(tensor: torch.Tensor, hook: Callable[[], object]) -> torch.Tensor:
    def call(_: torch.Tensor) -> None:
        with torch.enable_grad():
            hook()

    tensor.register_hook(call)
    return tensor


def leaf_loss() -> torch.Tensor:
    return torch.ones((), requires_grad=True) * 1.0


@case
def gradcache(model: Any, backward: Backward, number: int) -> None:
    """The engine is called by a hook of a loss that it has not computed."""

    def parts() -> None:
        for part in range(3):
            loss_of(model, number + part).backward()

    with torch.no_grad():
        loss_of(model, number)
    backward(with_hook(leaf_loss(), parts))


@case
def torch_style_behind_gradcache(model: Any, backward: Backward, number: int) -> None:
    """DeepSpeed counts a pass for each part of GradCache, of which it ends one alone."""
    loss_of(model, number).backward()


@case
def gradcache_of_towers(model: Any, backward: Backward, number: int) -> None:
    """A parameter's first gradient comes in the second pass, and is added to nothing."""

    def parts() -> None:
        for part, tower in enumerate(("left", "right", "left")):
            backward(loss_of(model, number + part, tower))

    backward(with_hook(leaf_loss(), parts))


@case
def reentrant_checkpoints_of_the_engine(model: Any, backward: Backward, number: int) -> None:
    inputs = [rows(number + part).requires_grad_() for part in range(2)]
    outputs = [checkpoint(model, one, use_reentrant=True) for one in inputs]
    backward(torch.stack(outputs).square().mean())


@case
def checkpoints_of_the_engine(model: Any, backward: Backward, number: int) -> None:
    outputs = [checkpoint(model, rows(number + part), use_reentrant=False) for part in range(2)]
    backward(torch.stack(outputs).square().mean())


@case
def a_look_in_the_middle(model: Any, backward: Backward, number: int) -> None:
    def look() -> None:
        with torch.no_grad():
            loss_of(model, number + 1)

    middle = with_hook(model(rows(number), "left"), look)
    backward(model(middle, "right").square().mean())


@case
def behind_an_error(model: Any, backward: Backward, number: int) -> None:
    """Torch-style passes, of which the first fails half-way; after it DeepSpeed reduces none."""

    def fail() -> None:
        raise UserError

    middle = with_hook(model(rows(number), "left"), fail)
    try:
        model(middle, "right").square().mean().backward()
    except UserError:
        pass
    else:
        raise AssertionError("nothing failed")
    if isinstance(model, Towers):
        model.zero_grad()
    loss_of(model, number + 1).backward()


@case
def an_error_that_a_hook_catches(model: Any, backward: Backward, number: int) -> None:
    def parts() -> None:
        loss_of(model, number + 5).backward()
        behind_an_error(model, backward, number)

    backward(with_hook(leaf_loss(), parts))


@case
def after_it(model: Any, backward: Backward, number: int) -> None:
    """The engine is usable behind the error of the case before."""
    backward(loss_of(model, number))


def difference(engine: Any, plain: Towers) -> float:
    """Return the largest one of a gradient, as a part of its norm."""
    worst = 0.0
    for mine, own in zip(engine.module.parameters(), plain.parameters(), strict=True):
        truth = torch.zeros_like(own) if own.grad is None else own.grad.clone()
        comm.all_reduce(truth)
        truth /= comm.get_world_size()
        found = safe_get_full_grad(mine).float() - truth
        worst = max(worst, float(found.norm() / truth.norm().clamp_min(1e-30)))
    return worst


def run_case(engine: Any, plain: Towers, test: Case, number: int) -> float | str:
    with torch.no_grad():
        for mine, own in zip(engine.module.parameters(), plain.parameters(), strict=True):
            with deepspeed.zero.GatheredParameters([mine]):
                own.copy_(mine)
    plain.zero_grad()
    test(plain, lambda loss: loss.backward(), number)
    try:
        test(engine, engine.backward, number)
    except memascend.errors.IncompleteGradientError as error:
        return type(error).__name__
    found = difference(engine, plain)
    engine.step()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("drive")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    gc.disable()
    gc.freeze()
    found: dict[str, Any] = {}
    world = comm.get_world_size()
    for kind in ("streamed", "flat"):
        streaming = {"streaming": {"gradients": {"enabled": kind == "streamed"}}}
        config = training_config(arguments.drive, BLOCK | streaming, world)
        del config["bf16"]  # so that a sum has no more than torch's own rounding
        config["zero_optimization"]["reduce_bucket_size"] = 2 * WIDTH * WIDTH  # some in a pass
        torch.manual_seed(1)
        engine = deepspeed.initialize(model=Towers(), config=config)[0]
        plain = Towers()
        found[kind] = {}
        for number, (name, test) in enumerate(CASES.items()):
            if number % world == comm.get_rank():
                gc.collect()  # ranks collect the engine before at different times
            found[kind][name] = [
                run_case(engine, plain, test, 100 * number + 10 * step) for step in range(STEPS)
            ]
        engine.destroy()
    if comm.get_rank() == 0:
        say("RESULT " + json.dumps(found))
    leave()


if __name__ == "__main__":
    main()
