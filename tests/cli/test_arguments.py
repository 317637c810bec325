"""Words of the command line."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from memascend.cli.arguments import folder, size, whole_number


def test_a_count_is_a_whole_number() -> None:
    assert whole_number("131072") == 131072
    for text in ("1e3", "", "-1", str((1 << 40) + 1)):
        with pytest.raises(ArgumentTypeError, match="whole number"):
            whole_number(text)


def test_a_count_has_a_largest() -> None:
    assert whole_number("8", most=8) == 8
    with pytest.raises(ArgumentTypeError, match="from 1 to 8, got 9"):
        whole_number("9", most=8)


@pytest.mark.parametrize("wrong", ["much", "0", "-1GiB", "1e30"])
def test_a_size_is_kept_as_it_is_written_or_refused(wrong: str) -> None:
    assert size("24GiB") == "24GiB"
    with pytest.raises(ArgumentTypeError):
        size(wrong)


def test_an_empty_folder_is_refused() -> None:
    assert folder("/mnt/ssd") == Path("/mnt/ssd")
    with pytest.raises(ArgumentTypeError, match="perhaps a variable is not set"):
        folder("")
