"""Compares the installed DeepSpeed with the known releases, definition by definition.

Every definition must be that of one and the same release: our code was tried on whole releases. A
mixture, such as one fix taken over into an older release, may lack what another definition counts
on. Imports DeepSpeed, and nothing of ours that uses another name of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from memascend.deepspeed.seams import fingerprints
from memascend.deepspeed.seams.fingerprint import (
    file_fingerprint,
    fingerprint,
    forget_sources,
    home_of,
)
from memascend.deepspeed.seams.table import relied_on

#: The fingerprint of a definition that DeepSpeed does not have.
MISSING = "missing"
_NOT_THERE = (ImportError, AttributeError, OSError)  # OSError: no source file


@dataclass(frozen=True, slots=True)
class Comparison:
    """The known release that the installed one is most like.

    Attributes:
        release: Its version; the newest one if several are as like.
        differing: Each definition that is not its own, with its fingerprint or MISSING; empty if
            the installed DeepSpeed is supported.
    """

    release: str
    differing: Mapping[str, str]


def compare() -> Comparison:
    """Compare the installed DeepSpeed with all known releases.

    Call it only while disarmed: afterwards it would see our own code.
    """
    digest = digest_of_files()
    for release, known in fingerprints.DIGESTS.items():
        if digest == known:
            return Comparison(release, {})
    return nearest(definitions())


def nearest(installed: Mapping[str, str]) -> Comparison:
    """Return the known release that has most of these definitions."""
    compared = (Comparison(one, _differing(installed, one)) for one in fingerprints.VERSIONS)
    return min(reversed([*compared]), key=lambda comparison: len(comparison.differing))


def _differing(installed: Mapping[str, str], release: str) -> dict[str, str]:
    known = known_definitions(release)
    return {name: found for name, found in installed.items() if known.get(name) != found}


def known_definitions(release: str) -> dict[str, str]:
    """Return the fingerprint of every definition in a known release."""
    earlier = {*fingerprints.VERSIONS[: fingerprints.VERSIONS.index(release) + 1]}
    known = {}
    for name, changes in fingerprints.KNOWN.items():
        words = changes.split()
        pairs = zip(words[::2], words[1::2], strict=True)
        known[name] = [found for since, found in pairs if since in earlier][-1]
    return known


def definitions() -> dict[str, str]:
    """Return the fingerprint of every definition of the installed DeepSpeed, or MISSING."""
    found = {}
    for module, attribute in relied_on():
        try:
            found[f"{module}.{attribute}"] = fingerprint(module, attribute)
        except _NOT_THERE:
            found[f"{module}.{attribute}"] = MISSING
    forget_sources()
    return found


def digest_of_files() -> str:
    """Return 16 hex digits that change when anything changes in a file with such a definition.

    If they are those of a known release no definition need be looked for, which would take most of
    a second of every start.
    """
    files = {}
    for module, attribute in relied_on():
        name, file = _file_of(module, attribute)
        files[name] = file
    forget_sources()
    lines = [f"{name} {found}\n" for name, found in sorted(files.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def _file_of(module: str, attribute: str) -> tuple[str, str]:
    """Return the name of the file with a definition, and the fingerprint of the whole file."""
    try:
        if "/" in attribute:
            return attribute, file_fingerprint(module, attribute)
        home = home_of(module, attribute)
    except _NOT_THERE:
        home = module
    try:
        return home, file_fingerprint(home)
    except _NOT_THERE:
        return home, MISSING
