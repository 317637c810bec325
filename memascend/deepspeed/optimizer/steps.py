"""The two ways of stepping: in tiles, or whole sub-groups.

DeepSpeed's step loop is kept: for each sub-group it prepares, unscales, steps, writes back and
releases. Whole sub-groups do this with our store and memory; in tiles all of it happens in the
optimizer step. Both have the same methods; `original` is DeepSpeed's own way, with its arguments.
"""

from __future__ import annotations

from memascend.deepspeed.optimizer.tiled import TiledSteps
from memascend.deepspeed.optimizer.whole import WholeSteps

#: A way of stepping. One thread at a time may call.
StepPath = TiledSteps | WholeSteps
