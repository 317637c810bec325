"""Steps of a save or a load that every rank takes, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from deepspeed import comm as dist

from memascend.errors import CheckpointError

Result = TypeVar("Result")


def rank_of(engine: Any) -> int:
    """Return the number under which upstream saves a rank's tensors."""
    return int(engine.local_rank if engine.use_node_local_storage() else engine.global_rank)


def on_every_rank(engine: Any, action: Callable[[], Result]) -> Result:
    """Do something on every rank; an error of one is an error of all, and nobody waits forever.

    Raises:
        CheckpointError: It failed on another rank.
    """
    error: BaseException | None = None
    result: Any = None
    try:
        result = action()
    except Exception as raised:
        error = raised
    failed = torch.tensor([error is not None], dtype=torch.int32, device=engine.device)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if error is not None:
        raise error
    if failed.item():
        raise CheckpointError(
            "the checkpoint failed on another rank, and so on this one. The cause, and what to do, "
            "are in the error of that rank"
        )
    return result  # type: ignore[no-any-return]
