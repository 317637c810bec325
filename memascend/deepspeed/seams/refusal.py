"""The message that refuses another release of DeepSpeed: the advice first, then the facts.

Knows release numbers and names of definitions; compares no code, and imports nothing of DeepSpeed.
"""

from __future__ import annotations

import re

from memascend.deepspeed.seams.compare import MISSING, Comparison
from memascend.deepspeed.seams.fingerprints import VERSIONS

NAMED_MAX = 3
TURN_OFF = 'to train without memascend: MEMASCEND_DISABLE=1, or "memascend": {"enabled": false}'


def refusal(release: str, compared: Comparison) -> str:
    """Return three lines: the release to install, the differences, how to turn memascend off.

    Args:
        release: Version of the installed DeepSpeed.
        compared: The known release that it is most like, and how it differs.
    """
    return "\n".join((advice(release), _differences(compared), TURN_OFF))


def advice(release: str) -> str:
    """Return why a release is refused (older, patched or newer), and the command to run."""
    newest = VERSIONS[-1]
    if _numbers(release) < _numbers(VERSIONS[0]):
        return (
            f"DeepSpeed {release} is older than the releases that memascend supports. Run: pip "
            f"install 'deepspeed=={newest}'; or the oldest that works, {VERSIONS[0]}"
        )
    known = next((one for one in VERSIONS if _numbers(one) == _numbers(release)), "")
    if known:
        return (
            f"this DeepSpeed {release} was patched: its code is not that of the release. Run: pip "
            f"install --force-reinstall --no-deps 'deepspeed=={known}'"
        )
    return (
        f"DeepSpeed {release} is newer than the releases that memascend supports. Run: pip install "
        f"'deepspeed=={newest}', or install a memascend that supports {release}"
    )


def _differences(compared: Comparison) -> str:
    """Name a few definitions; missing ones come first."""
    differing = compared.differing
    names = sorted(differing, key=lambda name: differing[name] != MISSING)
    shown = [
        f"{name} ({MISSING})" if differing[name] == MISSING else name for name in names[:NAMED_MAX]
    ]
    more = len(names) - len(shown)
    listed = ", ".join(shown) + (f" and {more} more (all of them at log level DEBUG)" * (more > 0))
    return (
        f"it is most like DeepSpeed {compared.release} and differs from it in {len(names)} "
        f"definition(s) that memascend relies on: {listed}"
    )


def _numbers(release: str) -> list[int]:
    """Return the first three numbers of a release, to compare it with others."""
    return [int(number) for number in re.findall(r"\d+", release)[:3]]
