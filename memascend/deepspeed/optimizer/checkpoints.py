"""Checkpoint hooks of the ZeRO-3 optimizer.

The engine's functions are in deepspeed/checkpoint/; they open a checkpoint and pass it to the
optimizer, which loads it when DeepSpeed's own loading reaches the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from memascend.checkpoint.source import CheckpointSource
from memascend.deepspeed.optimizer.restore import restore


class CheckpointedOptimizer(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """Overrides while the engine saves or loads; upstream's own otherwise."""

    #: Whether DeepSpeed is saving or loading this optimizer.
    is_checkpointing = False
    _source: CheckpointSource | None = None
    _loads_states = True

    @contextmanager
    def checkpointing(
        self, source: CheckpointSource | None = None, *, with_states: bool = True
    ) -> Iterator[None]:
        """Within the context DeepSpeed saves or loads this optimizer as one that is not on NVMe.

        Args:
            source: The checkpoint to load; None for a save.
            with_states: Load the optimizer states too, not only the weights.
        """
        self.is_checkpointing = True
        self._source, self._loads_states = source, with_states
        try:
            yield
        finally:
            self.is_checkpointing = False
            self._source = None

    @property
    def model_states(self) -> Path | None:
        """The file to load the module from; None: the one that DeepSpeed finds."""
        return None if self._source is None else self._source.model_states

    def restore_checkpoint(self) -> None:
        """Load the checkpoint given to `checkpointing`; later calls do nothing.

        Raises:
            StoreError: The drive failed.
        """
        source, self._source = self._source, None
        if source is None:
            return
        optimizer_states: dict[str, Any] = {}
        tensors = source.weights()
        if self._loads_states:
            self._take_over(source.zero_states)
            optimizer_states, tensors = source.optimizer_states, source.tensors
        restore(self, optimizer_states, tensors)
        self.reset_swap_buffers()

    def _restore_from_bit16_weights(self) -> None:
        """While a checkpoint is loaded, take its master weights; otherwise as upstream."""
        if self.is_checkpointing:
            self.restore_checkpoint()
        else:
            super()._restore_from_bit16_weights()

    def _rigid_load_state_dict(self, state_dict: Any, load_optimizer_states: bool = True) -> None:
        """Load as upstream, also if parameters are on the drive and the optimizer is in memory.

        Upstream assumes that the parameters are in memory too.
        """
        # None for sub-groups whose parameters are on the drive.
        flats: list[Any] = self.fp16_partitioned_groups_flat
        if self.swap_optimizer or all(flat is not None for flat in flats):
            super()._rigid_load_state_dict(state_dict, load_optimizer_states)
            return
        self._take_over(state_dict)
        if load_optimizer_states:
            self._set_fp32_optimizer_param_groups()
            self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
            self._clear_fp32_optimizer_param_groups()
        saved_groups = state_dict["fp32_flat_groups"]
        pairs = zip(self.fp32_partitioned_groups_flat, saved_groups, strict=True)
        for sub_group_id, (current, saved) in enumerate(pairs):
            current.data.copy_(saved.data)
            self._reassign_or_swap_out_partitioned_parameters(sub_group_id)

    def _take_over(self, zero_states: Any) -> None:
        """Set the loss scaler and the overflow flag, which the base optimizer does not have."""
        self.loss_scaler = zero_states["loss_scaler"]
        self.dynamic_loss_scale = zero_states["dynamic_loss_scale"]
        self.overflow = zero_states["overflow"]
