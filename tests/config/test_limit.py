"""The limit: what may be written in the configuration."""

from __future__ import annotations

import pytest

from memascend.base.units import GIB
from memascend.config.limit import parse_limit
from memascend.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("6GiB", 6 * GIB),
        ("1.5 GB", 1_500_000_000),
        ("4096", 4096),
        (12345, 12345),
        (0.5, 4 * GIB),
        (1.0, 8 * GIB),
        (1, 8 * GIB),
        (1e-12, 1),
    ],
)
def test_a_limit_is_bytes_text_or_a_fraction(value: object, expected: int | None) -> None:
    assert parse_limit(value, available=8 * GIB) == expected


@pytest.mark.parametrize(
    "value",
    [0, -1, -0.5, 1.5, 0.0, float("nan"), float("inf"), True, False, "", "six", "6 apples", "-6GiB",
     "0.5", "0GiB", "50%", [], {}, b"6GiB"],
)  # fmt: skip
def test_anything_else_is_refused_with_key_value_and_what_is_allowed(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_limit(value, available=8 * GIB)
    for part in ("memascend.host_memory_limit", repr(value), "6GiB", "fraction"):
        assert part in str(caught.value)
