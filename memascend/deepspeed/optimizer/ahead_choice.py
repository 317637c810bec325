"""Which work is done ahead of steps: tiles are stepped during backward, or the first ones are read.

The block asks for it; the optimizer, the streams or the number of ranks may exclude it. One line of
the log has the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from deepspeed import comm as dist

from memascend.deepspeed.optimizer.ahead import KEY, AheadOfStep, DuringBackward, WorkAhead
from memascend.deepspeed.optimizer.fused_adam import FusedAdam, OwnSteps
from memascend.deepspeed.optimizer.fused_muon import FusedMuon
from memascend.deepspeed.optimizer.upstream import Upstream
from memascend.deepspeed.optimizer.worth import Worth
from memascend.plan.request import why_muon_is_after_backward
from memascend.runtime import Runtime

log = logging.getLogger(__name__)


def work_ahead(
    upstream: Upstream,
    runtime: Runtime,
    fused: FusedAdam | FusedMuon | OwnSteps,
    *,
    streams_gradients: bool,
    overlaps: Callable[[], bool],
    turn_off: Callable[[], None],
    after_backward: WorkAhead,
) -> AheadOfStep:
    """Return early steps if they are configured and this optimizer allows them.

    Args:
        upstream: The optimizer.
        runtime: Owner of the streams.
        fused: The optimizer's fused steps.
        streams_gradients: Whether gradients are in the gradient stream before they are final.
        overlaps: As of `DuringBackward`.
        turn_off: The same.
        after_backward: Work ahead of steps that do not begin during backward; returned if none do.
    """
    choice = runtime.config.streaming.optimizer.during_backward
    if not choice or is_never_early(upstream, runtime, fused, streams_gradients=streams_gradients):
        return after_backward
    assert not isinstance(fused, OwnSteps)
    return DuringBackward(
        upstream=upstream,
        runtime=runtime,
        fused=fused,
        overlaps=overlaps,
        turn_off=turn_off,
        after_backward=after_backward,
        worth=None if choice is True else Worth(),
    )


def is_never_early(
    upstream: Upstream,
    runtime: Runtime,
    fused: FusedAdam | FusedMuon | OwnSteps,
    *,
    streams_gradients: bool,
) -> bool:
    """Return whether a run cannot step tiles early; log the reason."""
    is_demanded = runtime.config.streaming.optimizer.during_backward is True
    level = logging.WARNING if is_demanded else logging.INFO
    reason = _why_never(upstream, runtime, fused, streams_gradients=streams_gradients)
    if not reason and not is_demanded and runtime.plan is not None and not runtime.plan.spare_count:
        reason = (
            "under host_memory_limit there is no memory for gradients that wait for their tiles, "
            "or a step would write more"
        )
    if reason and dist.get_rank() == 0:
        log.log(level, "memascend: %s has no effect: %s", KEY, reason)
    return bool(reason)


def _why_never(
    upstream: Upstream,
    runtime: Runtime,
    fused: FusedAdam | FusedMuon | OwnSteps,
    *,
    streams_gradients: bool,
) -> str:
    section = runtime.config.streaming.optimizer
    if isinstance(fused, FusedMuon):
        reason = why_muon_is_after_backward(
            world=dist.get_world_size(),
            may_clip=upstream.norm_max > 0,
            state_dtype=section.state_dtype,
            is_demanded=section.during_backward is True,
        )
        if reason:
            return reason
    if not fused.is_fused:
        name = type(upstream.base).__name__
        return f"{name} does not step in one pass (streaming.optimizer.fused)"
    if not streams_gradients or upstream.parameter_swapper is None:
        return "parameters and gradients are not streamed from and to the drive"
    return ""
