"""Limit on the device memory of released parameters, for the plan and for training.

A released parameter keeps its memory until the kernels that use it have run. The more of them may
be queued, the longer the device computes while the host waits for a drive or for Python. The device
needs a constant time for each byte of them (two operations per element and token), so a limit in
bytes is a limit in time: at 4096 tokens and 400 TFLOP/s a GiB lasts 11 ms.
"""

from __future__ import annotations

from memascend.base.units import MIB

#: The limit on small devices: the two largest matrices of a model with 8 billion parameters.
RELEASED_BYTES_MIN = 256 * MIB
#: So many bytes keep a device busy while the host waits 5 ms; at most this fraction of the device's
#: memory is spent for that.
HELD_UP_BYTES = 768 * MIB
HELD_UP_DIVISOR = 32
#: A larger device is also faster and gets more: 1.25 GiB of 80 GiB, ten such matrices.
RELEASED_DIVISOR = 64

#: Released parameters that may always be queued, of any size: with fewer the device would idle
#: between two layers.
RELEASED_COUNT_MIN = 2


def released_bytes_max(device_bytes: int) -> int:
    """Return how many bytes of released parameters may wait for kernels of a device of so many."""
    held_up_bytes = min(HELD_UP_BYTES, device_bytes // HELD_UP_DIVISOR)
    return max(RELEASED_BYTES_MIN, held_up_bytes, device_bytes // RELEASED_DIVISOR)
