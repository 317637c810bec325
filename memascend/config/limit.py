"""The limit of host memory, as the user states it. Pure."""

from __future__ import annotations

import math

from memascend.base.units import NBYTES_MAX, parse_nbytes
from memascend.errors import ConfigError

KEY = "memascend.host_memory_limit"


def parse_limit(value: object, *, available: int) -> int | None:
    """Return the configured limit in bytes; None for no stated limit.

    The value is a number of bytes; text such as "6GiB"; or a fraction of `available`, above 0 and
    up to 1. A bare 1 is the fraction, since a limit of one byte makes no sense.

    Raises:
        ConfigError: Any other value; the message names the key, the value and the allowed values.
    """
    if value is None:
        return None
    if isinstance(value, str):
        try:
            nbytes = parse_nbytes(value)
        except ConfigError as error:
            raise _refused(value, str(error).partition(". ")[0]) from error
        if nbytes == 0:
            raise _refused(value, "it comes to 0 bytes; a fraction is a number, not text")
        return nbytes
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refused(value, f"it is a {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise _refused(value, "it is not a finite number")
    if value <= 0:
        raise _refused(value, "it must be above 0")
    if value <= 1:
        return max(1, int(value * available))
    if value != int(value):
        raise _refused(value, "a fraction is at most 1, and bytes are a whole number")
    if value >= NBYTES_MAX:
        raise _refused(value, "it is too large")
    return int(value)


def _refused(value: object, reason: str) -> ConfigError:
    return ConfigError(
        f"{KEY}: {value!r:.100} is not allowed: {reason}. Allowed: bytes as a whole number, text "
        'such as "6GiB" or "500 MB", or a fraction of the total memory, above 0 and up to 1. '
        "Leave it out for the default: as much as the plan needs, at most half of the free memory"
    )
