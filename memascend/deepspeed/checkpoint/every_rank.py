"""Actions of a save or a load that succeed on every rank or raise on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from memascend.deepspeed.attach.agreement import all_or_none
from memascend.errors import CheckpointError

Result = TypeVar("Result")


def rank_of(engine: Any) -> int:
    """Return the rank number that upstream uses in the file names of a rank's tensors."""
    return int(engine.local_rank if engine.use_node_local_storage() else engine.global_rank)


def on_every_rank(action: Callable[[], Result]) -> Result:
    """Run an action on every rank; if one rank raises, all raise, so that none waits forever."""
    with all_or_none(_failed_elsewhere):
        return action()


def _failed_elsewhere(ranks: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint failed on another rank ({ranks}), and so on this one. The cause and the "
        "fix are in the error of that rank"
    )
