"""The optimizer swapper that stage 3 uses when the optimizer is streamed.

Stage 3 calls few of its methods: the step itself goes through the overrides of TiledSteps, which
never bring a whole sub-group into memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from memascend.streaming.gradients.stream import GradientStream
from memascend.streaming.optimizer.sub_group import Member
from memascend.streaming.optimizer.sub_groups import SubGroups


class StreamedSwapper:
    """The methods of DeepSpeed's OptimizerSwapper that are still called."""

    def __init__(
        self,
        *,
        groups: SubGroups,
        gradient_stream: GradientStream,
        lock: AbstractContextManager[Any],
    ) -> None:
        self._groups = groups
        self._gradient_stream = gradient_stream
        self._runtime_lock = lock  # the runtime's: gradients come in hooks of autograd's threads

    def is_swappable_tensor(self, tensor: Any = None, numel: int | None = None) -> bool:
        """Return True for every sub-group, however small: all are on the drive."""
        return bool(getattr(tensor, "swappable", True))

    def initialize_parameters(
        self, parameters: Sequence[Any], src_tensors: Sequence[torch.Tensor]
    ) -> None:
        """Store master weights, except those that were already streamed in."""
        for parameter, source in zip(parameters, src_tensors, strict=True):
            if not self._groups.contains(parameter.ds_id):
                member = Member(0, source.numel(), source.dtype, tensor=source)
                with self._runtime_lock:
                    self._groups.create(parameter.ds_id, source.numel(), [member])

    def swap_out_gradients(
        self, parameter: Any, gradient_offsets: list[int], gradient_tensors: list[torch.Tensor]
    ) -> None:
        """Store gradients of a finished window, which DeepSpeed's flat buffer has accumulated."""
        for offset, gradient in zip(gradient_offsets, gradient_tensors, strict=True):
            with self._runtime_lock:
                self._gradient_stream.put(parameter.ds_id, offset, gradient.view(-1))

    def purge_state(self) -> None:
        """Drop optimizer states; master weights stay."""
        self._groups.discard_states()

    def log_timers(self) -> None:
        """Do nothing: upstream times separate phases, which overlap here."""

    pre_backward = post_backward = log_timers
