"""Byte counts as text and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memascend.base.units import format_nbytes, page_down, page_up, parse_nbytes, power_of_two_up
from memascend.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("512", 512),
        ("6GiB", 6 << 30),
        ("1.5 GiB", 3 << 29),
        ("2gb", 2_000_000_000),
        (" 64 k ", 65536),
    ],
)
def test_a_number_with_a_unit_is_read(text: str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "1 PiB", "1,5GiB", "6 GiB please"])
def test_other_text_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError, match="GiB"):
        parse_nbytes(text)


@pytest.mark.parametrize("value", [True, -1, "-1MiB"])
def test_a_bool_or_a_negative_number_is_no_byte_count(value: int | str) -> None:
    with pytest.raises(ConfigError, match="byte count"):
        parse_nbytes(value)


@given(st.integers(min_value=0, max_value=1 << 50))
def test_formatting_keeps_the_size_within_half_a_percent(nbytes: int) -> None:
    assert parse_nbytes(format_nbytes(nbytes)) == pytest.approx(nbytes, rel=0.005, abs=1)


@pytest.mark.parametrize(
    ("nbytes", "up", "down"), [(0, 0, 0), (1, 4096, 0), (4096, 4096, 4096), (4097, 8192, 4096)]
)
def test_bytes_are_rounded_to_whole_pages(nbytes: int, up: int, down: int) -> None:
    assert (page_up(nbytes), page_down(nbytes)) == (up, down)


@pytest.mark.parametrize(
    ("number", "up"), [(0, 0), (1, 1), (2, 2), (3, 4), (4096, 4096), (4097, 8192)]
)
def test_a_power_of_two_is_the_next_one_or_the_number_itself(number: int, up: int) -> None:
    assert power_of_two_up(number) == up
