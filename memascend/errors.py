"""The errors that memascend raises: one family, each also derived from the matching builtin.

A message states, in this order: the failed operation, its values, the likely cause, and the remedy.
The native core raises these classes by name, so this module imports nothing.
"""

from __future__ import annotations


class MemAscendError(Exception):
    """Base class of all memascend errors."""


class ConfigError(MemAscendError, ValueError):
    """A value in the `memascend` block (or in the DeepSpeed config beside it) cannot be used."""


class UnsupportedDeepSpeedError(MemAscendError, RuntimeError):
    """The installed DeepSpeed differs from the versions that the seams were written for."""


class HostMemoryError(MemAscendError, MemoryError):
    """A request for host memory exceeds the system's memory or the plan's limit.

    Attributes:
        requested_bytes: Bytes requested.
        reserved_bytes: Bytes already reserved.
        limit_bytes: The limit in bytes, 0 when none is stated.
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
    """The volumes lack room for a reservation; raised before anything is written."""


class CorruptionError(StoreError):
    """Bytes on a volume differ from those that were written; `offset` is that of the grain."""


class TornStepError(MemAscendError, RuntimeError):
    """An optimizer step or load ended half-way, so some values are new and others old."""


class GradientGoneError(MemAscendError, RuntimeError):
    """A gradient was requested that a step has consumed; nothing was changed."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}: streaming.optimizer.during_backward has stepped with this gradient, and kept "
            "it nowhere. Weights and optimizer states are those of before the step: training can "
            "continue with another backward pass, or be saved. fix: change and read nothing "
            'between backward and step(), or set "during_backward": false'
        )

    @classmethod
    def of_update(cls) -> GradientGoneError:
        """Return the error for a gradient that has become an update of Muon, which is applied."""
        error = cls("")
        error.args = (
            "cannot read a gradient after step(): it is the update of Muon, which the step has "
            "applied, and kept nowhere. Training can continue, or be saved. fix: read gradients "
            'between backward and step(), or set "fused": false in streaming.optimizer',
        )
        return error


class IncompleteGradientError(MemAscendError, RuntimeError):
    """Gradients were to be used after a backward pass that failed or is still running."""

    def __init__(self) -> None:
        super().__init__(
            "the gradients are incomplete: a backward pass of this engine failed or still runs. "
            "likely cause: an error in a backward pass was caught and training continued without "
            "another forward pass, or it was caught inside engine.backward(); or a hook of a "
            "backward pass began another one of the same engine. Weights and optimizer states are "
            "unchanged. fix: let the error leave the outer backward(), then repeat the micro-step "
            "from its forward pass on. A hook may call the engine during the backward() of a loss "
            "that the engine did not compute (GradCache)"
        )


class LoneRankError(MemAscendError, RuntimeError):
    """A rank failed in a pass alone and continued, while other ranks wait in that pass.

    Attributes:
        rank: The rank that failed.
        others: The ranks that may wait for it.
    """

    def __init__(self, rank: int, others: list[int], patience_s: float) -> None:
        self.rank, self.others = rank, others
        super().__init__(
            f"rank {rank} failed in a pass and begins another one, but rank(s) "
            f"{', '.join(map(str, others))} did not fail in it within {patience_s:.0f} s: they "
            "wait in the collectives of the failed pass. fix: start all ranks again; if device "
            "memory ran out, with smaller slices (memascend.micro_batches.sequences) or a smaller "
            "batch. A script may try a pass again only if all ranks fail in it"
        )


class WriteBudgetError(MemAscendError, RuntimeError):
    """A run wrote more than its write budget; its checkpoint is complete."""


class EngineUnavailableError(MemAscendError, OSError):
    """The I/O engine that was requested by name cannot run here."""


class CheckpointError(MemAscendError, OSError):
    """A checkpoint cannot be written, or is damaged, incomplete, or of another model."""
