"""Wraps the engine's forward pass, so that saved activations go to the drive."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from memascend.deepspeed.attach.attachment import attachment_of_optimizer
from memascend.deepspeed.attach.lone_failure import noting_forward
from memascend.deepspeed.monitor.engine import watching_forward
from memascend.deepspeed.older_releases import begin_forward
from memascend.deepspeed.slices.engine import repeating, slicing
from memascend.streaming.activations.hooks import SavedTensors

#: The hooks of the running forward pass; None outside of one.
current: ContextVar[SavedTensors | None] = ContextVar("memascend_saved_tensors", default=None)


def wrap_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `DeepSpeedEngine.forward`: slices, saved activations, times, and lone failures."""

    @functools.wraps(original)
    def forward(self: Any, *inputs: Any, **keywords: Any) -> Any:
        def run() -> Any:
            if attachment_of_optimizer(self.optimizer) is not None:
                stop_timers(self)
                self.optimizer.check_values()  # its parameters may be in memory
                begin_forward(self.optimizer)
            with (
                watching_forward(self, inputs, keywords),
                saving(self),
                slicing(self, inputs, keywords),
            ):
                return original(self, *inputs, **keywords)

        with _noting(self):
            return repeating(self, run)

    return forward


def stop_timers(engine: Any) -> None:
    """Stop the timers that a pass or step which an error has ended left running.

    DeepSpeed has them with `wall_clock_breakdown`. Their next start would be an AssertionError, so
    that no step could be tried again.
    """
    for name in engine.engine_timers.active_timers():
        timer = engine.timers(name)
        if timer.started_:
            timer.stop()


def _noting(engine: Any) -> AbstractContextManager[None]:
    attachment = attachment_of_optimizer(engine.optimizer)
    if attachment is None or attachment.failures is None:
        return nullcontext()
    return noting_forward(
        attachment.failures,
        # A pass of a step may have no gradient yet, as the first one of GradCache.
        trains=engine.module.training or torch.is_grad_enabled(),
        was_left=engine.optimizer.passes.passes.was_left(),
    )


def saving(engine: Any) -> AbstractContextManager[object]:
    """Return a context whose saved tensors go to the drive; no effect if `activations` is off."""
    attachment = attachment_of_optimizer(engine.optimizer)
    if attachment is None or not torch.is_grad_enabled():
        return nullcontext()
    section = attachment.runtime.config.activations
    if not section.enabled:
        return nullcontext()
    saved = SavedTensors(
        attachment.runtime.activations,
        min_bytes=section.min_bytes,
        device=torch.device(get_accelerator().current_device_name()),
        is_of_model=ModelTensors(engine.module),
    )
    return _saving(saved)


@contextmanager
def _saving(saved: SavedTensors) -> Iterator[None]:
    """Set the hooks, and make them available as `current`."""
    with saved.hooks():
        token = current.set(saved)
        try:
            yield
        finally:
            current.reset(token)


class ModelTensors:
    """Recognises tensors of a model: its parameters, also while they are gathered, and buffers."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._buffers = {buffer.untyped_storage()._cdata for buffer in module.buffers()}

    def __call__(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is one; a view of a parameter is not."""
        return (
            hasattr(tensor, "ds_id")
            or isinstance(tensor, torch.nn.Parameter)
            or tensor.untyped_storage()._cdata in self._buffers
        )
