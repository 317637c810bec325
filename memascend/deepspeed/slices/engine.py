"""Slices of the batch around an engine's forward pass (section `micro_batches`)."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from memascend.config.block import MicroBatchConfig
from memascend.deepspeed.attach.attachment import attachment_of_optimizer
from memascend.deepspeed.slices.held import held
from memascend.deepspeed.slices.weights import PassGradients
from memascend.slices.layers import Slicer
from memascend.slices.model import SlicedModel


class EngineSlices:
    """The slices of one optimizer's model."""

    def __init__(self, optimizer: Any, section: MicroBatchConfig) -> None:
        """Look at the model of an optimizer of ours, and take part in its backward passes."""
        self._optimizer = weakref.ref(optimizer)
        by_slice = section.reduction == "slice"
        self._gradients = PassGradients(optimizer.upstream, held, by_slice=by_slice)
        optimizer.passes.slices = self._gradients
        slicer = Slicer(self._gradients.weights_of)
        self._model = SlicedModel(optimizer.upstream.module, slicer, slices_head=section.head)
        self._section = section

    def is_of(self, optimizer: Any) -> bool:
        """Return whether these are the slices of an optimizer."""
        return self._optimizer() is optimizer

    def running(
        self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        """Return a context of one forward pass."""
        self._gradients.begin()
        return self._model.running(arguments, keywords, self._section.slices_of)


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
