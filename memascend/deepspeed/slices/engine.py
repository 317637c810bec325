"""Slices of the batch around an engine's forward pass (section `micro_batches`)."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from memascend.config.block import MicroBatchConfig
from memascend.deepspeed.attach.attachment import attachment_of_optimizer
from memascend.deepspeed.plan.from_optimizer import least_of_ranks
from memascend.deepspeed.slices.device import device_memory
from memascend.deepspeed.slices.held import held
from memascend.deepspeed.slices.weights import PassGradients
from memascend.slices.auto import AutoSlices, StatedSlices
from memascend.slices.layers import Slicer, WeightsOf
from memascend.slices.model import SlicedModel
from memascend.slices.random_states import RandomState

log = logging.getLogger(__name__)


class EngineSlices:
    """The slices of one optimizer's model."""

    def __init__(self, optimizer: Any, section: MicroBatchConfig) -> None:
        """Look at the model of an optimizer of ours, and take part in its backward passes."""
        self._optimizer = weakref.ref(optimizer)
        self._module = optimizer.upstream.module
        by_slice = section.reduction == "slice"
        self._gradients = PassGradients(optimizer.upstream, held, by_slice=by_slice)
        optimizer.passes.slices = self._gradients
        #: Chooses the number of slices; None: the block states it.
        self._auto = AutoSlices(device_memory(), least_of_ranks) if section.is_auto else None
        slices = self._auto or StatedSlices(section.slices_of)
        weights_of: WeightsOf = slices.watched(self._gradients.weights_of)
        self._count_of = slices.slices_of
        self._model = SlicedModel(
            self._module,
            Slicer(weights_of),
            slices_head=section.head,
            step_count=lambda: self._gradients.step_count,
            note_count=self._agree if by_slice else lambda _: None,
        )

    def is_of(self, optimizer: Any) -> bool:
        """Return whether these are the slices of an optimizer."""
        return self._optimizer() is optimizer

    def _agree(self, count: int) -> None:
        """Take the most slices of a rank: each slice is reduced, by all ranks together."""
        self._gradients.slice_count = -least_of_ranks(-count)

    def running(
        self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        """Return a context of one forward pass."""
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer.passes.drop_left()  # DeepSpeed does so within the pass
        self._gradients.begin()
        if self._auto is not None and self._module.training and torch.is_grad_enabled():
            self._auto.begin()
        return self._model.running(arguments, keywords, self._count_of)

    @property
    def can_repeat(self) -> bool:
        """Whether a forward pass that fails may begin again.

        Other ranks would not: they wait in the collectives of the pass that failed. Inside of a
        backward pass gradients have arrived.
        """
        optimizer = self._optimizer()
        is_alone = dist.get_world_size() == 1
        return (
            self._auto is not None
            and is_alone
            and optimizer is not None
            and not optimizer.passes.passes.is_under_way()
        )

    @property
    def shrunk_to(self) -> int | None:
        """Most sequences of a slice, if memory ran out in the last pass; None: nothing changed."""
        return None if self._auto is None else self._auto.shrunk_to


def slicing(
    engine: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> AbstractContextManager[None]:
    """Return a context in which an engine's model runs in slices; no effect if it does not."""
    attachment = attachment_of_optimizer(engine.optimizer)
    if attachment is None:
        return nullcontext()
    section = attachment.runtime.config.micro_batches
    if section is None:
        return nullcontext()
    slices: EngineSlices | None = attachment.slices
    if slices is None or not slices.is_of(engine.optimizer):
        slices = attachment.slices = EngineSlices(engine.optimizer, section)
    return slices.running(arguments, keywords)


def repeating(engine: Any, run: Callable[[], Any]) -> Any:
    """Return the output of a forward pass; it is repeated once if smaller slices may fit.

    No gradient exists then, and random numbers are as before: the result is that of a pass which
    had the smaller slices from its start.
    """
    attachment = attachment_of_optimizer(engine.optimizer)
    slices: EngineSlices | None = None if attachment is None else attachment.slices
    if slices is None or not slices.can_repeat:
        return run()
    accelerator = get_accelerator()
    random = RandomState([torch.empty(0, device=accelerator.current_device_name())])
    try:
        return run()
    except torch.OutOfMemoryError:
        if slices.shrunk_to is None:
            raise
    # Only here the failed pass has let go of its memory.
    log.warning(
        "memascend: the forward pass ran out of device memory and begins again, with slices of up "
        "to %d sequence(s)",
        slices.shrunk_to,
    )
    accelerator.empty_cache()
    random.restore()
    return run()
