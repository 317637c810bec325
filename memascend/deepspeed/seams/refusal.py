"""The message that refuses another release of DeepSpeed: the advice first, then the facts.

Knows release numbers and names of definitions; compares no code, and imports nothing of DeepSpeed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from memascend.deepspeed.seams.fingerprints import VERSIONS

#: Supported releases, as in pyproject.toml.
RANGE = ">=0.19.8,<0.20"
#: The fingerprint of a definition that upstream does not have.
MISSING = "missing"

NAMED_MAX = 3
TURN_OFF = 'to train without memascend: MEMASCEND_DISABLE=1, or "memascend": {"enabled": false}'


def refusal(release: str, differing: Mapping[str, str]) -> str:
    """Return three lines: the release to install, the differences, how to turn memascend off.

    Args:
        release: Version of the installed DeepSpeed.
        differing: Each definition whose code is not known, with its fingerprint or MISSING.
    """
    return "\n".join((advice(release), _differences(differing), TURN_OFF))


def advice(release: str) -> str:
    """Return why a release is refused (older, patched or newer), and the command to run."""
    newest = VERSIONS[-1]
    if _numbers(release) < _numbers(VERSIONS[0]):
        return (
            f"DeepSpeed {release} is older than the releases that memascend supports. Run: pip "
            f"install 'deepspeed{RANGE}'"
        )
    if _numbers(release) in map(_numbers, VERSIONS):
        return (
            f"this DeepSpeed {release} was patched: its code is not that of the release. Run: pip "
            f"install --force-reinstall --no-deps 'deepspeed=={newest}'"
        )
    return (
        f"DeepSpeed {release} is newer than the releases that memascend supports. Run: pip install "
        f"'deepspeed=={newest}', or install a memascend that supports {release}"
    )


def _differences(differing: Mapping[str, str]) -> str:
    """Name a few definitions; missing ones come first."""
    names = sorted(differing, key=lambda name: differing[name] != MISSING)
    shown = [
        f"{name} ({MISSING})" if differing[name] == MISSING else name for name in names[:NAMED_MAX]
    ]
    more = len(names) - len(shown)
    listed = ", ".join(shown) + (f" and {more} more (all of them at log level DEBUG)" * (more > 0))
    return (
        f"it differs from DeepSpeed {', '.join(VERSIONS)} in {len(names)} definition(s) that "
        f"memascend relies on: {listed}"
    )


def _numbers(release: str) -> list[int]:
    """Return the first three numbers of a release, to compare it with others."""
    return [int(number) for number in re.findall(r"\d+", release)[:3]]
