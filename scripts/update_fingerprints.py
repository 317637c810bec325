#!/usr/bin/env python3
"""Writes memascend/deepspeed/seams/fingerprints.py from the installed DeepSpeed.

Run it in an environment of each supported release (oldest first); what is known already is kept,
and what is relied on no more is left out.
Only do so after the parity tests pass on that release: the table says "these seams fit this code".
"""

from __future__ import annotations

from pathlib import Path

import deepspeed

from memascend.deepspeed.seams import fingerprints
from memascend.deepspeed.seams.fingerprint import file_fingerprint, fingerprint, home_of
from memascend.deepspeed.seams.table import relied_on

TARGET = Path(__file__).parent.parent / "memascend" / "deepspeed" / "seams" / "fingerprints.py"
HEAD = '''"""Fingerprints of the upstream definitions that the seams were written for.

Written by scripts/update_fingerprints.py; do not edit.
"""

from __future__ import annotations
'''


def main() -> None:
    """Adds the installed release to the table."""
    known, homes = {}, set()
    for module, attribute in relied_on():
        name, found = f"{module}.{attribute}", fingerprint(module, attribute)
        if "/" not in attribute:
            homes.add(home_of(module, attribute))
        known[name] = list(dict.fromkeys([*fingerprints.KNOWN.get(name, ()), found]))
    versions = [*fingerprints.VERSIONS]
    if deepspeed.__version__ not in versions:
        versions.append(deepspeed.__version__)
    lines = [HEAD, f"VERSIONS: tuple[str, ...] = {tuple(versions)!r}", ""]
    lines.append("KNOWN: dict[str, tuple[str, ...]] = {")
    for name, hashes in sorted(known.items()):
        lines.append(f"    {name!r}: {tuple(hashes)!r},")
    lines += ["}", "", "#: Whole files of the release that this was last written for."]
    lines.append("FILES: dict[str, str] = {")
    lines += [f"    {home!r}: {file_fingerprint(home)!r}," for home in sorted(homes)]
    lines.append("}")
    TARGET.write_text("\n".join(lines).replace("'", '"') + "\n")


if __name__ == "__main__":
    main()
