"""Wraps the engine's forward pass and step: measures times, tokens and progress.

These numbers are only for display. So this code never raises, waits for the device, or communicates
with other ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from deepspeed import comm as dist

from memascend.deepspeed.attach.attachment import attachment_of_optimizer
from memascend.deepspeed.monitor.logs import write_events
from memascend.ledger.trace import FORWARD, OPTIMIZER
from memascend.monitor.status_file import Progress, StatusFile


def wrap_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `DeepSpeedEngine.step`; a call that steps the optimizer ends a step of the status."""

    @functools.wraps(original)
    def step(self: Any, *arguments: Any, **keywords: Any) -> Any:
        attachment = attachment_of_optimizer(self.optimizer)
        if attachment is None:
            return original(self, *arguments, **keywords)
        is_optimizers = self.is_gradient_accumulation_boundary()
        phase = attachment.phase(OPTIMIZER) if is_optimizers else nullcontext()
        with phase, _stepping(attachment.status, self):
            return original(self, *arguments, **keywords)

    return step


@contextmanager
def _stepping(status: StatusFile | None, engine: Any) -> Iterator[None]:
    if status is None:
        yield
        return
    steps, samples = engine.global_steps, engine.global_samples
    status.begin_step()
    try:
        yield
    finally:
        is_boundary = engine.global_steps != steps
        progress = functools.partial(_progress, engine, samples) if is_boundary else None
        status.end_step(progress)
        if is_boundary:
            status.attempt(lambda: write_events(engine, status))


@contextmanager
def watching_forward(
    engine: Any, inputs: Sequence[Any], keywords: Mapping[str, Any]
) -> Iterator[None]:
    """Wrap a forward pass; no effect without an optimizer or gradients."""
    attachment = attachment_of_optimizer(engine.optimizer)
    if attachment is None or not torch.is_grad_enabled():
        yield
        return
    status = attachment.status
    if status is not None:
        # DeepSpeed's backward hooks set it, and this forward pass will reset it.
        after_backward = bool(getattr(engine.optimizer, "_backward_seen_this_step", False))
        count_tokens = functools.partial(_token_count, inputs, keywords)
        status.begin_forward(after_backward=after_backward, count_tokens=count_tokens)
    try:
        with attachment.phase(FORWARD):
            yield
    finally:
        if status is not None:
            status.end_forward()


def _progress(engine: Any, samples_before: int) -> Progress:
    samples = engine.global_samples - samples_before
    return Progress(
        step=engine.global_steps,
        steps_total=_steps_total(engine.lr_scheduler),
        samples=samples / dist.get_world_size(),
    )


def _steps_total(schedule: Any) -> int | None:
    """Return the number of optimizer steps of a learning-rate schedule; None if it has none.

    DeepSpeed's and torch's schedules have it as an attribute, those of transformers as an argument
    of their functions.
    """
    functions = getattr(schedule, "lr_lambdas", None) or [None]
    arguments = getattr(functions[0], "keywords", {})
    found = (
        getattr(schedule, "total_num_steps", None),
        getattr(schedule, "total_steps", None),
        arguments.get("num_training_steps"),
    )
    return next((int(steps) for steps in found if steps), None)


def _token_count(inputs: Sequence[Any], keywords: Mapping[str, Any]) -> int:
    """Return the elements of `input_ids`, or of a first argument that is a 2-D integer tensor."""
    named = keywords.get("input_ids")
    if isinstance(named, torch.Tensor):
        return named.numel()
    first = inputs[0] if inputs else None
    if not isinstance(first, torch.Tensor) or first.dtype not in (torch.int64, torch.int32):
        return 0
    return first.numel() if first.dim() == 2 else 0
