"""Every error memascend raises on purpose: one family, each also the builtin a caller would expect.

A message states, in this order: what failed, with what values, the likely cause, and what to do.
The native core raises these classes by name, so this module imports nothing.
"""

from __future__ import annotations


class MemAscendError(Exception):
    """Root of the family."""


class ConfigError(MemAscendError, ValueError):
    """A value in the `memascend` block (or in the DeepSpeed config beside it) cannot be used."""


class UnsupportedDeepSpeedError(MemAscendError, RuntimeError):
    """The installed DeepSpeed differs from the ones a seam was written for."""


class HostMemoryError(MemAscendError, MemoryError):
    """Host memory of ours was asked for beyond what the system or the plan allows.

    Attributes:
        requested_bytes: What was asked for.
        reserved_bytes: What was held already.
        limit_bytes: What may be held, 0 when there is no stated limit.
    """

    requested_bytes: int = 0
    reserved_bytes: int = 0
    limit_bytes: int = 0


class StoreError(MemAscendError, OSError):
    """A read or write of the store failed.

    Attributes:
        key: Name of the tensor in the store, empty when the failure is not about one key.
        volume: Path of the volume.
        offset: First byte on the volume of the failed transfer.
        nbytes: Bytes of the failed transfer.
        errno: The operating system's error number, 0 when the device ended early.
    """

    key: str = ""
    volume: str = ""
    offset: int = 0
    nbytes: int = 0


class StoreFullError(StoreError):
    """The volume cannot hold what is to be reserved; raised before anything is written."""


class CorruptionError(StoreError):
    """Bytes on a volume are not those that were written there; `offset` is the grain's."""


class TornStepError(MemAscendError, RuntimeError):
    """An optimizer step ended half-way, so the values do not belong together any more."""


class GradientGoneError(MemAscendError, RuntimeError):
    """A gradient is asked for that a step during backward has used up; nothing was changed."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}: streaming.optimizer.during_backward has stepped with this gradient, and kept "
            "it nowhere. Weights and optimizer states are those of before the step: training can "
            "go on with another backward pass, or be saved. fix: change and read nothing between "
            'backward and step(), or set "during_backward": false'
        )


class IncompleteGradientError(MemAscendError, RuntimeError):
    """Gradients are to be used though a backward pass has failed or is not over."""

    def __init__(self) -> None:
        super().__init__(
            "the gradients are incomplete: a backward pass of this engine failed or still runs. "
            "likely cause: an error in a backward pass was caught and training went on without "
            "another forward pass, or it was caught inside engine.backward(); or a hook of a "
            "backward pass began another one of the same engine. Weights and optimizer states are "
            "those of before. fix: let the error leave the outer backward(), then repeat the "
            "micro-step from its forward pass on. A hook may call the engine while the backward() "
            "of a loss runs that the engine has not computed (GradCache)"
        )


class WriteBudgetError(MemAscendError, RuntimeError):
    """A run wrote more than the user allows; its checkpoint is complete."""


class EngineUnavailableError(MemAscendError, OSError):
    """The I/O engine asked for by name cannot run here."""


class CheckpointError(MemAscendError, OSError):
    """A checkpoint cannot be written, or is damaged, incomplete or of another model."""
