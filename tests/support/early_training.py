"""A Training whose steps are made early, with a stand-in for the fused step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch

from memascend.streaming.optimizer.during_backward import EarlyPart, TilesDuringBackward
from memascend.streaming.optimizer.sub_group_step import EarlyStep, early_key
from tests.support.tiled_training import SIZES, Training, gradients

BF16 = torch.bfloat16
NAMES = list(SIZES)
FACTOR = 0.5


def descend(
    *,
    begin: int,
    gradient: torch.Tensor,
    factor: float,
    weight: torch.Tensor,
    values: Any,
    scales: Any,
    output: Any,
) -> None:
    """Stand for a fused step: element by element, in fp32."""
    weight.sub_(gradient.float() * factor)
    for state in values.values():
        if isinstance(state, torch.Tensor):
            state.add_(1.0)
    if output is not None:
        output.copy_(weight)


class Counted:
    """The same for the step that is made: it counts."""

    def __init__(self) -> None:
        self.elements: list[int] = []

    def __call__(self, *, values: Any, gradient: torch.Tensor, **tensors: Any) -> None:
        values["step"] += 1
        self.elements.append(gradient.numel())
        descend(values=values, gradient=gradient, **tensors)


class Early:
    """A Training of which every parameter is on the drive, with states, and steps made early."""

    def __init__(self, spare_count: int) -> None:
        self.training = Training(
            lambda params: torch.optim.SGD(params, lr=1.0), state_count=1, spare_count=spare_count
        )
        self.store = self.training.store
        self.stream = self.training.stream
        self.stream._take_over = self.take_over
        self.members = {name: self.training.members[name][:2] for name in NAMES}
        self.training.members = self.members
        for name in NAMES:
            group = self.training.groups.group(name)
            self.training.groups.add_state(name, "moment", torch.float32, 0.0)
            self.training.groups.settle()
            for key in (*group.all_keys, *(member.key for member in self.members[name])):
                self.store.reserve(key=early_key(key), nbytes=self.store.nbytes(key=key))
            parameter = self.training.parameters[name]
            self.training.optimizer.state[parameter] = {"step": 0, "moment": torch.empty(0)}
        self.executor = ThreadPoolExecutor(1)
        self.background = SimpleNamespace(run=self.run, use_device=int)
        self.may_step = threading.Event()
        self.may_step.set()
        self.early = TilesDuringBackward(stream=self.stream, background=self.background)  # type: ignore[arg-type]

    def take_over(self, *, key: str, other: str) -> None:
        self.store.exchange(key=key, other=other)

    def run(self, function: Callable[[], None]) -> Future[None]:
        def held() -> None:
            assert self.may_step.wait(30)
            function()

        return self.executor.submit(held)

    def part(self, name: str, **changes: Any) -> EarlyPart:
        step = EarlyStep(name, descend, FACTOR, self.members[name])
        ranges = {"ranges": [(0, SIZES[name])], **changes}
        return EarlyPart(step=step, begins=self.training.groups.begins(name), **ranges)

    def begin(self) -> None:
        self.early.expect([self.part(name) for name in NAMES])

    def put(self, number: int, *names: str) -> None:
        for name in names:
            self.put_part(number, name, 0, SIZES[name])

    def put_part(self, number: int, name: str, offset: int, numel: int) -> None:
        value = gradients(number, BF16)[name][offset : offset + numel]
        bypass = self.early.bypass_of(name, offset)
        self.training.gradient_stream.put(name, offset, value, bypass=bypass)
        self.early.note_copied()

    def all_stepped(self) -> None:
        """Return when every tile is stepped that is complete."""
        self.executor.submit(int).result()

    def finish(self, fused: Counted) -> None:
        """Make the step, with whatever was early."""
        self.early.close()
        begins, error = self.early.take_results(self.training.gradient_stream.put_back)
        assert error is None
        self.training.step({}, FACTOR, fused, begins)

    def values(self) -> list[torch.Tensor]:
        found = []
        for name in NAMES:
            found.append(self.training.parameter(name))
            found += [self.training.master(name, state) for state in (None, "moment")]
            found.append(torch.tensor(self.state(name)["step"]))
        return found

    def state(self, name: str) -> Any:
        return self.training.optimizer.state[self.training.parameters[name]]
