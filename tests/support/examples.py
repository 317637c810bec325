"""How many examples a property is tried on: all that it asks for, or a part in a quick run."""

from __future__ import annotations

from hypothesis import settings

FULL_PROFILE_COUNT = 100  # what the profile "full" of tests/conftest.py gives a test that is silent


def examples(full_count: int) -> int:
    """Return `full_count` in the full profile, and in proportion fewer in another."""
    return max(1, full_count * settings().max_examples // FULL_PROFILE_COUNT)
