"""Drive space for saving a run, beside values that a step has written a second time."""

from __future__ import annotations

from contextlib import suppress

from memascend.base.units import format_nbytes
from memascend.config.environment import local_world_size
from memascend.plan.second_values import lacking_bytes
from memascend.runtime import Runtime


def too_little_room(runtime: Runtime) -> str:
    """Say how much less is free than saving the run takes; empty if it is not, or not known.

    Each rank asks when it has reserved its own room, and others may have reserved theirs.
    """
    plan, free_bytes = runtime.plan, None
    with suppress(OSError):
        free_bytes = runtime.drive.free_bytes()
    if plan is None or free_bytes is None:
        return ""
    lacking = lacking_bytes(plan, free_bytes, ranks=local_world_size())
    if not lacking:
        return ""
    return (
        "beside a step's new values the drive would have no room to save the run: "
        f"{format_nbytes(free_bytes)} are free, {format_nbytes(lacking)} less than that takes"
    )
