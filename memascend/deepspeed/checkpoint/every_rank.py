"""Steps of a save or a load that every rank takes, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from memascend.deepspeed.attach.agreement import all_or_none
from memascend.errors import CheckpointError

Result = TypeVar("Result")


def rank_of(engine: Any) -> int:
    """Return the number under which upstream saves a rank's tensors."""
    return int(engine.local_rank if engine.use_node_local_storage() else engine.global_rank)


def on_every_rank(action: Callable[[], Result]) -> Result:
    """Do something on every rank; an error of one is an error of all, and nobody waits forever.

    Raises:
        CheckpointError: It failed on another rank.
    """
    with all_or_none(_failed_elsewhere):
        return action()


def _failed_elsewhere(ranks: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint failed on another rank ({ranks}), and so on this one. The cause, and what "
        "to do, are in the error of that rank"
    )
