"""The shape of one optimizer's tiles: sizes from the plan, dtypes from optimizer and block."""

from __future__ import annotations

from memascend.deepspeed.optimizer.upstream import Upstream
from memascend.deepspeed.plan.optimizers import (
    is_elementwise,
    moments,
    state_count,
    state_dtype,
)
from memascend.plan.knobs import tile_sizes
from memascend.runtime import Runtime
from memascend.streaming.optimizer.tile_memory import TileShape


def tile_shape(upstream: Upstream, runtime: Runtime, *, streams_gradients: bool) -> TileShape:
    """Return the contents and the number of tiles.

    Args:
        upstream: The optimizer.
        runtime: Has the block, and the plan if there is one.
        streams_gradients: Whether gradients are stored as they arrive. Those of DeepSpeed's flat
            buffer are cast before.
    """
    section, plan = runtime.config.streaming.optimizer, runtime.plan
    numel, count = tile_sizes(
        max(upstream.numels),
        sum(upstream.numels),
        is_tiled=is_elementwise(upstream.base),
        tile_bytes=section.tile_bytes,
    )
    if plan is not None:
        numel, count = plan.tile_numel, plan.tile_count
    master_dtype = upstream.master_dtype
    return TileShape(
        numel=numel,
        count=count,
        state_count=state_count(upstream.base),
        master_dtype=master_dtype,
        state_dtype=state_dtype(upstream.base, master_dtype, section.state_dtype),
        gradient_dtype=upstream.accumulation_dtype if streams_gradients else master_dtype,
        parameter_dtype=upstream.stored_dtype,
        spare_count=0 if plan is None else plan.spare_count,
        moments=moments(section.state_dtype),
    )
