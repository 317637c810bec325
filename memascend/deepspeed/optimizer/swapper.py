"""Stands where stage 3 looks for its optimizer swapper when the optimizer is streamed.

Stage 3 asks it little: the step itself goes through StreamedOptimizer's overrides, which never
bring a whole sub-group into memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memascend.streaming.gradients import GradientSpool
from memascend.streaming.optimizer import OptimizerStream


class StreamedSwapper:
    """The surface of DeepSpeed's OptimizerSwapper that remains."""

    def __init__(self, *, stream: OptimizerStream, spool: GradientSpool) -> None:
        self.stream = stream
        self.spool = spool

    def is_swappable_tensor(self, tensor: Any = None, numel: int | None = None) -> bool:
        """Every sub-group is on the drive, however small."""
        return bool(getattr(tensor, "swappable", True))

    def initialize_parameters(
        self, parameters: Sequence[Any], src_tensors: Sequence[torch.Tensor]
    ) -> None:
        """Stores master weights; those that were streamed in already stay."""
        for parameter, source in zip(parameters, src_tensors, strict=True):
            if self.stream.contains(parameter.ds_id):
                continue

            def fill(begin: int, target: torch.Tensor, source: torch.Tensor = source) -> None:
                target.copy_(source.narrow(0, begin, target.numel()))

            self.stream.create(parameter.ds_id, source.numel(), fill)

    def swap_out_gradients(
        self, parameter: Any, gradient_offsets: list[int], gradient_tensors: list[torch.Tensor]
    ) -> None:
        """Stores gradients of a finished window (DeepSpeed's flat buffer did the adding up)."""
        for offset, gradient in zip(gradient_offsets, gradient_tensors, strict=True):
            self.spool.put(parameter.ds_id, offset, gradient.view(-1))

    def purge_state(self) -> None:
        """Forgets optimizer state; master weights stay."""
        self.stream.forget_states()

    def init_timers(self) -> None:
        """Nothing to time here: reads and writes overlap the step."""

    def log_timers(self) -> None:
        """Nothing was timed."""

    def pre_backward(self) -> None:
        """Nothing to prepare."""

    def post_backward(self) -> None:
        """Nothing to finish: gradients are on their way."""

    def flush_gradients(self) -> None:
        """Hands what is staged to the store."""
