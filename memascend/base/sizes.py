"""Sizes that the plan counts with and the data paths allocate by, each stated once."""

from __future__ import annotations

from typing import Any

from memascend.base.units import MIB

#: Bounce buffers: enough to keep a drive busy.
BOUNCE_BYTES = 4 * MIB
#: Staging slots while a model is built, and as many as a plan has without a limit.
STAGING_SLOT_COUNT, STAGING_SLOT_BYTES = 4, 8 * MIB
#: Parameter slots that prefetching may fill, at least.
PREFETCH_BYTES_MIN = 32 * MIB
#: A shape that occurs this often among the shards belongs to the layers.
REPEATED_COUNT_MIN = 3
#: Gradients that may wait to be added. With the current one eight make a sum: most windows are
#: powers of two. They take 14 bytes beside the 4 or 8 of the sums. Fewer save less: of the 8 bytes
#: that a micro-step moves in a long window 4.5 are left with seven, 4.8 with four, 6 with one.
APPENDED_COUNT_MAX = 7
#: If the step begins during backward, one tile in this many waits for the next forward pass, so
#: that the drive's work divides as compute does: an element that is stepped early moves 28 bytes in
#: backward and 2 in forward, one that waits 4 and 30. A share of 0.30 would be right for a backward
#: pass twice as long as forward, and 0.20 for one of three times, with checkpoints.
LEFT_ONE_OF = 4
#: Gradients that wait on the device, at most by default: a layer of an 8B model has 416 MiB.
GRADIENT_ROOM_BYTES_MAX = 512 * MIB
#: Saved activations in flight between device and drive, or host: this many of the largest one.
IN_FLIGHT_COUNT = 2
#: Saved activations on the drive for which the plan has checksums: their number follows from the
#: batch, which no plan knows.
ACTIVATIONS_BYTES = 256 << 30

#: Elements of a sub-group that share the fp32 scale of a moment in codes.
SCALE_NUMEL = 128


def casts(dtype: Any, master_dtype: Any) -> bool:
    """Return whether a tile needs one more block, for values of another dtype than the master's.

    A tile has such a block for parameters of another dtype than that of master weights, and all
    tiles together one into which gradients of another dtype are cast. The plan asks with names of
    dtypes, the tiles with torch's: fp16 and bf16 are of one size, and not the same.
    """
    return bool(dtype != master_dtype)
