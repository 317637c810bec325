"""The types that sections share: sizes and paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from memascend.config.section import Nbytes, PathText, Section


class Example(Section):
    size: Nbytes = 4096
    limit: Nbytes | None = None
    count: int = 1
    path: PathText | None = None


@pytest.mark.parametrize("value", [1 << 20, "1MiB", "1048576", 1048576.0])
def test_a_size_is_a_number_or_text_with_a_unit(value: object) -> None:
    assert Example.model_validate({"size": value, "limit": value}) == Example(
        size=1 << 20, limit=1 << 20
    )


def test_a_size_may_have_an_exponent() -> None:
    for value in (1e9, "1e9"):
        assert Example.model_validate({"size": value}).size == 10**9


@pytest.mark.parametrize("value", [True, 1.5, float("inf"), float("nan"), "1 parsec", "1e999", []])
def test_anything_else_is_no_size(value: object) -> None:
    with pytest.raises(ValueError, match="size"):
        Example.model_validate({"size": value})


def test_a_path_may_come_from_python() -> None:
    assert Example.model_validate({"path": Path("/a/b")}).path == "/a/b"


@pytest.mark.parametrize("value", [b"/a", 7, "a\0b", "\ud800"])
def test_anything_that_no_file_can_be_called_is_no_path(value: object) -> None:
    with pytest.raises(ValueError, match="path"):
        Example.model_validate({"path": value})
