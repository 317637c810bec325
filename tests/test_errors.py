"""Errors are one family, and each is a builtin too, so that callers need not know the family."""

from __future__ import annotations

import pytest

from memascend import errors

FAMILY = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and value is not errors.MemAscendError
]


@pytest.mark.parametrize("error", FAMILY, ids=lambda error: error.__name__)
def test_an_error_is_of_the_family_and_a_builtin(error: type[Exception]) -> None:
    assert issubclass(error, errors.MemAscendError)
    assert issubclass(error, ValueError | RuntimeError | MemoryError | OSError)


def test_what_an_error_is_about_is_there_before_anybody_sets_it() -> None:
    full = errors.StoreFullError(28, "no space")
    assert (full.errno, full.key, full.volume, full.offset, full.nbytes) == (28, "", "", 0, 0)
    memory = errors.HostMemoryError("no memory")
    assert (memory.requested_bytes, memory.reserved_bytes, memory.limit_bytes) == (0, 0, 0)
