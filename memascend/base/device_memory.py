"""The share of a device's memory that the host may run ahead by, for the plan and for training.

A parameter that is let go holds its memory until the kernels that use it have run. The more of them
may wait, the longer the device computes while the host is held up, by the drive or by Python. The
device needs a constant time for a byte of them (two operations for each element and token), so the
share is that much time: at 4096 tokens and 400 TFLOP/s a GiB lasts 11 ms.
"""

from __future__ import annotations

from memascend.base.units import MIB

#: The limit on small devices: the two largest matrices of a model with 8 billion parameters.
RELEASED_BYTES_MIN = 256 * MIB
#: These keep a device busy while the host is held up for 5 ms; no more of its memory than a part in
#: so many is spent for that.
HELD_UP_BYTES = 768 * MIB
HELD_UP_DIVISOR = 32
#: A larger device is faster, too, and may have more: 1.25 GiB of 80 GiB, ten such matrices.
RELEASED_DIVISOR = 64

#: Parameters that may always be waiting, however large: with fewer the device would stand still
#: between two layers.
RELEASED_COUNT_MIN = 2


def released_bytes_max(device_bytes: int) -> int:
    """Return how much device memory of parameters let go may wait for kernels.

    Args:
        device_bytes: All memory of the device.
    """
    held_up_bytes = min(HELD_UP_BYTES, device_bytes // HELD_UP_DIVISOR)
    return max(RELEASED_BYTES_MIN, held_up_bytes, device_bytes // RELEASED_DIVISOR)
