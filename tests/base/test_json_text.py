"""JSON from elsewhere: nothing but a ValueError comes of reading it, and messages stay short."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memascend.base.json_text import parse_json, read_json_object, show_json
from memascend.errors import ConfigError

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(values)
def test_what_json_writes_is_read(value: object) -> None:
    assert parse_json(json.dumps(value)) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        (b"\xff\xfe\xfd", "codec"),
        ("{}".encode("utf-16"), "codec"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("9" * 5000, "4300 digits"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', 'the key "c" occurs twice'),
    ],
    ids=["empty", "no text", "utf-16", "lists", "objects", "digits", "twice"],
)
def test_whatever_is_wrong_is_a_value_error(text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)


@given(values)
def test_small_values_are_shown_as_they_are_written(value: object) -> None:
    text = json.dumps(value)
    shown = show_json(value)
    assert shown == text or len(shown) > 20
    if "..." not in shown:
        assert json.loads(shown) == value


@pytest.mark.parametrize(
    "value",
    ["a" * 10_000, 10**5000, [["x" * 500] * 500] * 500, {str(n): [n] * 99 for n in range(999)}],
    ids=["text", "number", "lists", "object"],
)
def test_large_values_are_shown_in_part(value: object) -> None:
    assert len(show_json(value)) < 20_000


def test_what_is_nested_is_shown_to_some_depth() -> None:
    value: object = 1
    for _ in range(100_000):
        value = [value]
    assert show_json(value) == "[[[[[...]]]]]"


def test_what_json_does_not_have_is_shown_too() -> None:
    assert show_json(math.inf) == "Infinity"
    assert show_json(b"bytes") == "b'bytes'"


def test_a_file_that_a_failed_command_left_empty_is_said_to_be(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text("\n")
    with pytest.raises(ConfigError, match=r"--config .*ds\.json is empty: the program"):
        read_json_object(file, "--config")
