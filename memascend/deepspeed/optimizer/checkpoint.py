"""Checkpoint hooks of the ZeRO-3 optimizer.

The engine's functions are in deepspeed/checkpoint/; they open a checkpoint and pass it to the
optimizer, which loads it when DeepSpeed's own loading reaches the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from pathlib import Path
from typing import Any

from memascend.checkpoint.converted import rounded
from memascend.checkpoint.source import CheckpointSource
from memascend.deepspeed.attach.attachment import Attachment
from memascend.deepspeed.optimizer.choice import StepPath
from memascend.deepspeed.optimizer.locked import locked
from memascend.deepspeed.optimizer.refusals import refusal_of_call
from memascend.deepspeed.optimizer.restore import restore
from memascend.deepspeed.optimizer.upstream import LOADED, Upstream
from memascend.runtime import Runtime


class Loads(Enum):
    """The part of a checkpoint that is loaded into the optimizer."""

    ALL = auto()  #: Master weights and states.
    WEIGHTS = auto()  #: Master weights alone.
    #: Master weights alone, rounded to the parameters' dtype: CPU offload makes them of these.
    ROUNDED_WEIGHTS = auto()


class CheckpointHooks:
    """Hooks that act while the engine saves or loads; DeepSpeed's own way otherwise."""

    def __init__(
        self, upstream: Upstream, attach: Callable[[], Attachment], steps: StepPath
    ) -> None:
        """Start outside of a save or load.

        Args:
            upstream: The optimizer.
            attach: Returns the model's attachment.
            steps: Holds the values that are saved and loaded.
        """
        self._upstream, self._attach, self._steps = upstream, attach, steps
        #: Whether DeepSpeed is saving or loading this optimizer.
        self.is_active = False
        self._source: CheckpointSource | None = None
        self._loads = Loads.ALL

    @contextmanager
    def active(
        self, source: CheckpointSource | None = None, *, loads: Loads = Loads.ALL
    ) -> Iterator[None]:
        """Within the context DeepSpeed saves or loads this optimizer as one that is not on NVMe.

        Args:
            source: The checkpoint to load; None for a save.
            loads: The part of it that is loaded.
        """
        self.is_active = True
        self._source, self._loads = source, loads
        try:
            yield
        finally:
            self.is_active = False
            self._source = None

    @property
    def model_states(self) -> Path | None:
        """The file to load the module from; None: the one that DeepSpeed finds."""
        return None if self._source is None else self._source.model_states

    def restore(self) -> None:
        """Load the checkpoint given to `active`; later calls do nothing.

        Raises:
            StoreError: The drive failed.
        """
        source, self._source = self._source, None
        if source is None:
            return
        optimizer_states: dict[str, Any] = {}
        tensors = source.weights()
        if self._loads is Loads.ALL:
            self._upstream.set_scaler(source.zero_states)
            optimizer_states, tensors = source.optimizer_states, source.tensors
        elif self._loads is Loads.ROUNDED_WEIGHTS:
            tensors = [rounded(tensor, self._upstream.stored_dtype) for tensor in tensors]
        self._upstream.partition_parameters()  # their keys are written with the master weights
        self._restore(optimizer_states, tensors, source.powers)
        self._upstream.refresh_parameters()

    @locked
    def _restore(self, optimizer_states: dict[str, Any], tensors: Any, powers: Any) -> None:
        slots = self.runtime.staging
        restore(self._upstream, self._steps, slots, optimizer_states, tensors, powers)

    @property
    def runtime(self) -> Runtime:
        """The model's runtime."""
        return self._attach().runtime

    def load_weights(self, original: Callable[[], None]) -> None:
        """While a checkpoint is loaded, take its master weights; otherwise as DeepSpeed.

        Raises:
            ConfigError: Weights are on the drive, and none is loaded.
        """
        if self.is_active:
            self.restore()
        elif self._upstream.states_on_drive or any(flat is None for flat in self._upstream.flats):
            raise refusal_of_call("refresh_fp32_params")
        else:
            self._steps.finish()
            self._steps.drop_ahead(LOADED)
            original()

    def load_states(
        self, state_dict: Any, with_states: bool, original: Callable[[Any, bool], None]
    ) -> None:
        """Load as DeepSpeed, also if parameters are on the drive and the optimizer is in memory.

        DeepSpeed assumes that the parameters are in memory too.

        Raises:
            ConfigError: The states are in tiles on the drive.
        """
        upstream = self._upstream
        if self._steps.is_tiled:
            raise refusal_of_call("load_state_dict")
        self._steps.finish()
        self._steps.drop_ahead(LOADED)
        if upstream.states_on_drive or all(flat is not None for flat in upstream.flats):
            original(state_dict, with_states)
            return
        upstream.set_scaler(state_dict)
        if with_states:
            with upstream.masters_in_groups():
                upstream.base.load_state_dict(state_dict["optimizer_state_dict"])
        saved_groups = state_dict["fp32_flat_groups"]
        pairs = zip(upstream.masters, saved_groups, strict=True)
        for number, (master, saved) in enumerate(pairs):
            master.data.copy_(saved.data)
            upstream.update_parameters(number)
