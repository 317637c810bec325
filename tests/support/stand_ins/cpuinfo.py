"""What DeepSpeed asks py-cpuinfo, without its measuring of the clock.

DeepSpeed asks several times in each process: for every optimizer, twice for every operator that it
loads. Each answer of py-cpuinfo takes a second in which a core does nothing but wait.
tests/conftest.py puts this folder before the libraries, for the tests and whatever they start.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

PROC = Path("/proc/cpuinfo")
#: In py-cpuinfo's words, by the machine's.
ARCHITECTURES = {"x86_64": "X86_64", "aarch64": "ARM_8"}


def get_cpu_info() -> dict[str, Any]:
    """Return the architecture, the flags in order, and the vendor where there is one."""
    fields: dict[str, str] = {}
    for line in PROC.read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags") or fields.get("Features") or ""
    found: dict[str, Any] = {
        "arch": ARCHITECTURES[platform.machine()],
        "flags": sorted(flags.split()),
    }
    if "vendor_id" in fields:
        found["vendor_id_raw"] = fields["vendor_id"]
    return found
