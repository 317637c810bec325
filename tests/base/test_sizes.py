"""The sizes that plan and data paths share, and the one question about dtypes that both ask."""

from __future__ import annotations

import pytest

from memascend.base.sizes import casts


@pytest.mark.parametrize(
    ("dtype", "master", "expected"),
    [("fp32", "fp32", False), ("bf16", "fp32", True), ("fp16", "bf16", True)],
)
def test_another_dtype_takes_memory_of_its_own_even_of_the_same_size(
    dtype: str, master: str, expected: bool
) -> None:
    assert casts(dtype, master) is expected
