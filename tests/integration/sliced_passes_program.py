"""Disturbs a training whose layers run in slices, and compares its gradients with those of torch.

Started by tests/deepspeed/slices/test_engine.py. Prints, as JSON, by name of the case the largest
difference of a gradient from that of torch alone, relative to its norm, in a step after it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import time
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch._dynamo  # as checkpoints do, here: before what is imported is frozen
from deepspeed import comm
from deepspeed.runtime.engine import EngineTimers
from deepspeed.utils import safe_get_full_grad, set_z3_leaf_modules
from torch import nn
from torch.utils.checkpoint import checkpoint

from memascend.deepspeed.attach import lone_failure
from memascend.errors import ConfigError, LoneRankError
from tests.integration.programs import BLOCK, training_config
from tests.support.process_group import leave, say

VOCABULARY, WIDTH, LENGTH, ROWS, EXPERTS = 64, 96, 4, 8, 3
Backward = Callable[[torch.Tensor], object]
Case = Callable[[Any, Backward, int], None]
CASES: dict[str, Case] = {}
#: With `wall_clock_breakdown`, whose timers run when an error ends a pass. Some of the others are
#: too much for them without memascend as well, as two forward passes and one backward pass.
TIMED = ("error_in_a_slice_of_forward", "error_in_a_slice_of_backward")


class UserError(Exception):
    """An error of the script's own."""


class Block(nn.Module):
    """A layer with an expert for rows whose first value is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.expert = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.fails_in = -1  # so many calls from now
        self.error: type[BaseException] = UserError

    def forward(
        self, states: torch.Tensor, uses_expert: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return states, and router logits of shape (tokens, experts): they have no batch."""
        self.fails_in -= 1
        if self.fails_in == 0:
            raise self.error
        states = states + torch.tanh(self.linear(self.norm(states)))
        if uses_expert.any():
            states = states + uses_expert * self.expert(states)
        return states, self.router(states).flatten(0, 1)


class Model(nn.Module):
    """A decoder's parts: embedding, layers, one of them twice unless each is used once, a head."""

    def __init__(self, *, tied: bool, once: bool) -> None:
        super().__init__()
        self.is_layer_used_twice = not once
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.begins_with_prompt = False
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(
        self, ids: torch.Tensor, expert_rows: torch.Tensor, *, has_head: bool = True
    ) -> torch.Tensor:
        states = self.embedding(ids)
        if self.begins_with_prompt:  # of another batch, so not in slices
            states = states + self.embedding(ids[:1, :1])
        balance = states.new_zeros(())
        for layer in (*self.layers, self.layers[0])[: 2 + self.is_layer_used_twice]:
            states, logits = checkpoint(layer, states, expert_rows, use_reentrant=False)
            balance = balance + logits.softmax(-1).mean(0).square().sum()  # of all tokens
        if not has_head:
            return states.square().mean() + balance
        loss = nn.functional.cross_entropy(self.head(states).flatten(0, 1), ids.flatten())
        return loss + balance


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def loss_of(model: Any, number: int, rows: int = ROWS, experts: str = "all") -> torch.Tensor:
    seed = comm.get_world_size() * number + comm.get_rank()
    ids = torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))
    chosen = torch.zeros(rows, 1, 1)
    chosen[{"all": slice(None), "first": slice(0, 1), "last": slice(-1, None)}[experts]] = 1.0
    found: torch.Tensor = model(ids, chosen)
    return found


def layers_of(model: Any) -> Any:
    return getattr(model, "module", model).layers


@case
def undisturbed(model: Any, backward: Backward, number: int) -> None:
    backward(loss_of(model, number))


@case
def expert_of_the_first_slice(model: Any, backward: Backward, number: int) -> None:
    """The last slice brings no gradient of it."""
    backward(loss_of(model, number, experts="first"))


@case
def expert_of_the_last_slice(model: Any, backward: Backward, number: int) -> None:
    """It was not gathered with the first slice, which several ranks refuse."""
    if comm.get_world_size() == 1:
        backward(loss_of(model, number, experts="last"))
        return
    if not isinstance(model, Model):
        with contextlib.suppress(ConfigError):
            loss_of(model, number, experts="last")
            raise AssertionError("it was not refused")
    backward(loss_of(model, number))


@case
def shorter_batches(model: Any, backward: Backward, number: int) -> None:
    backward(loss_of(model, number, rows=(3, 1)[number % 2]))


@case
def a_batch_of_another_size_on_each_rank(model: Any, backward: Backward, number: int) -> None:
    """That of four rows has as many as tokens, so that it is not cut; gathers stay the same.

    Router logits are outputs of all of them.
    """
    rows = (LENGTH, ROWS) if number % 2 else (ROWS, 1)
    backward(loss_of(model, number, rows=rows[comm.get_rank()]))


@case
def forward_without_backward(model: Any, backward: Backward, number: int) -> None:
    loss_of(model, number + 1)
    backward(loss_of(model, number))


@case
def forward_whose_output_is_kept(model: Any, backward: Backward, number: int) -> None:
    kept = loss_of(model, number + 1)
    backward(loss_of(model, number))
    assert kept.requires_grad


@case
def two_forwards_and_one_backward(model: Any, backward: Backward, number: int) -> None:
    backward(loss_of(model, number) + loss_of(model, number + 1, rows=3))


@case
def evaluation_between(model: Any, backward: Backward, number: int) -> None:
    loss = loss_of(model, number)
    with torch.no_grad():
        loss_of(model, number + 1)
    backward(loss)
    model.eval()
    with torch.no_grad():
        loss_of(model, number + 1)
    model.train()


def _try(
    model: Any, backward: Backward, number: int, calls: int, kind: type[BaseException] = UserError
) -> BaseException:
    layer = layers_of(model)[1]
    layer.fails_in, layer.error = calls, kind
    try:
        backward(loss_of(model, number + 1))
    except kind as error:
        return error
    finally:
        layer.fails_in = -1
    raise AssertionError("it was not tried")


@case
def error_in_a_slice_of_forward(model: Any, backward: Backward, number: int) -> None:
    if not isinstance(model, Model):
        _try(model, backward, number, 3)
    backward(loss_of(model, number))


@case
def error_in_a_slice_of_backward(model: Any, backward: Backward, number: int) -> None:
    if not isinstance(model, Model):
        _try(model, backward, number, 4 + 3)
    backward(loss_of(model, number))


@case
def ctrl_c_in_a_slice(model: Any, backward: Backward, number: int) -> None:
    """In forward, then in backward."""
    for calls in () if isinstance(model, Model) else (3, 4 + 3):
        _try(model, backward, number, calls, KeyboardInterrupt)
    backward(loss_of(model, number))


@case
def out_of_memory_on_all_ranks(model: Any, backward: Backward, number: int) -> None:
    """In forward, then in backward; the script tries the step again."""
    for calls in () if isinstance(model, Model) else (3, 4 + 3):
        _try(model, backward, number, calls, torch.OutOfMemoryError)
    backward(loss_of(model, number))


@case
def error_that_the_script_keeps(model: Any, backward: Backward, number: int) -> None:
    """It keeps the graph of its pass alive, in which a part of the slices has its gradients."""
    kept = None if isinstance(model, Model) else _try(model, backward, number, 4 + 3)
    backward(loss_of(model, number))
    assert (kept is None) == isinstance(model, Model)


@case
def module_that_is_called_in_slices_and_whole(model: Any, backward: Backward, number: int) -> None:
    own = getattr(model, "module", model)
    own.begins_with_prompt = True
    backward(loss_of(model, number))
    own.begins_with_prompt = False


@case
def retained(model: Any, backward: Backward, number: int) -> None:
    if isinstance(model, Model):
        backward(loss_of(model, number))
    else:
        model.backward(loss_of(model, number), retain_graph=True)


def gradients(model: Any, *, of_engine: bool) -> dict[str, torch.Tensor]:
    found = {}
    for name, param in getattr(model, "module", model).named_parameters():
        one = safe_get_full_grad(param) if of_engine else param.grad
        if one is not None:
            found[name] = one.clone()
    return found


def compare(engine: Any, alone: Model, run: Case, number: int) -> float:
    alone.zero_grad()
    run(alone, lambda loss: loss.backward(), number)
    is_timed = run.__name__ in TIMED
    engine.engine_timers = EngineTimers(is_timed, is_timed)
    run(engine, engine.backward, number)
    if comm.get_world_size() > 1:
        for param in alone.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            comm.all_reduce(param.grad)
            param.grad /= comm.get_world_size()
    expected, found = gradients(alone, of_engine=False), gradients(engine, of_engine=True)
    worst = 0.0
    largest = max(one.norm().item() for one in expected.values())
    for name, one in found.items():
        right = expected.get(name)
        right = torch.zeros_like(one) if right is None else right
        worst = max(worst, (one - right).norm().item() / (right.norm().item() + 1e-6 * largest))
    engine.step()
    return worst if expected.keys() <= found.keys() else float("inf")


def count_calls(owner: Any, name: str) -> list[None]:
    original, calls = getattr(owner, name), []

    def counted() -> None:
        calls.append(None)
        original()

    setattr(owner, name, counted)
    return calls


def run_out_of_memory_alone(engine: Any, calls: int) -> None:
    """Rank 1 does, in a call of a layer, and tries again; rank 0 waits for it. Does not return."""
    lone_failure.PATIENCE_S, lone_failure.POLL_S = 2.0, 0.2
    engine.memascend.failures._end = lambda message: (say(f"ENDED {message}"), os._exit(0))
    if comm.get_rank() == 1:
        layer = layers_of(engine)[1]
        layer.fails_in, layer.error = calls, torch.OutOfMemoryError
        with contextlib.suppress(torch.OutOfMemoryError):
            engine.backward(loss_of(engine, 1))
        try:
            loss_of(engine, 1)
        except LoneRankError as error:
            say(f"REFUSED {error}")
            time.sleep(3 * lone_failure.PATIENCE_S)  # its end would end rank 0
            os._exit(0)
    engine.backward(loss_of(engine, 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("drive")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--by-slice", action="store_true")
    parser.add_argument("--without-number", action="store_true")
    parser.add_argument("--fails-in-forward", action="store_true")
    parser.add_argument("--leaves", action="store_true")
    parser.add_argument("--once", action="store_true", help="use each layer once")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    section: dict[str, Any] = {} if arguments.without_number else {"count": 4}
    section |= {"reduction": "slice"} if arguments.by_slice else {}
    config = training_config(arguments.drive, BLOCK | {"micro_batches": section}, 1)
    del config["bf16"]
    config["zero_optimization"]["reduce_bucket_size"] = 10_000  # no gradient waits for another
    config["optimizer"]["params"] = {"lr": 0.0, "weight_decay": 0.0}  # both keep their weights
    config["train_micro_batch_size_per_gpu"] = ROWS
    torch.manual_seed(0)
    model = Model(tied=arguments.tied, once=arguments.once)
    alone = copy.deepcopy(model)
    if arguments.leaves:
        set_z3_leaf_modules(model, [Block])
    engine, *_ = deepspeed.initialize(model=model, config=config)
    reductions = count_calls(engine.optimizer, "independent_gradient_partition_epilogue")
    # All gradients come from graphs inside the one that runs, which DeepSpeed has not begun.
    engine(torch.zeros(ROWS, LENGTH).long(), torch.ones(ROWS, 1, 1), has_head=False).backward()
    engine.step()
    found: dict[str, Any] = {"reductions": len(reductions)}
    found |= {
        name: [compare(engine, alone, run, number) for number in range(2)]
        for name, run in CASES.items()
    }
    if comm.get_rank() == 0:
        say("RESULT " + json.dumps(found))
    if comm.get_world_size() > 1:
        run_out_of_memory_alone(engine, 3 if arguments.fails_in_forward else 4 + 3)
    engine.destroy()
    leave()


if __name__ == "__main__":
    main()
