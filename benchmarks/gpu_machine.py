"""What a machine with GPUs has, free and in all, and how a report tells it.

Asks torch how many devices there are; makes no context, so that children begin without one.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_lacks
import harness

from memascend.base.units import GIB
from memascend.system.memory import memory_available, memory_total

DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Machine:
    """What decides which cases run. Bytes are those that are free, unless it says otherwise.

    Attributes:
        gpus: Devices that a run uses; 0 where there are none.
        device_bytes: Of the smallest device, in use or not.
        total_bytes: Host memory, in use or not.
    """

    gpus: int
    device_bytes: int
    host_bytes: int
    total_bytes: int
    drive_bytes: int


def look(directory: Path, *, gpus: int | None = None) -> Machine:
    """What there is now; of all devices, or of so many.

    Raises:
        SystemExit: More devices are asked for than there are, unless there are none.
    """
    import torch

    count = torch.cuda.device_count()
    if gpus is not None and not 1 <= gpus <= max(1, count):
        raise SystemExit(f"--gpus {gpus}: this machine has {count}")
    sizes = [torch.cuda.get_device_properties(number).total_memory for number in range(count)]
    return Machine(
        gpus=min(count, gpus or count),
        device_bytes=min(sizes, default=0),
        host_bytes=memory_available(),
        total_bytes=memory_total(),
        drive_bytes=shutil.disk_usage(directory).free,
    )


def facts(directory: Path, machine: Machine) -> dict[str, Any]:
    """The circumstances of a run, for its record."""
    import torch

    found = harness.machine(directory)
    number = re.search(r"\d+\.\d[\d.]*", DRIVER.read_text("ascii")) if DRIVER.exists() else None
    driver = number.group() if number else "unknown"
    versions = found["versions"] | {"cuda": str(torch.version.cuda), "driver": driver}
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no device"
    lacks = found.get("lacks", {}) | gpu_lacks.circumstances(directory)
    return found | {"versions": versions, "gpus": machine.gpus, "gpu": name, "lacks": lacks}


def describe(found: Mapping[str, Any]) -> str:
    """One line on the machine of a record, with the things it lacks."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lacks = "".join(f" {name}: {reason}." for name, reason in found.get("lacks", {}).items())
    return (
        f"{found['gpus']} x {found['gpu']}, {found['cpus_usable']} cores of {found['cpu']}, "
        f"{found['memory_bytes'] / GIB:.0f} GiB, kernel {found['kernel'].split('-')[0]}, "
        f"{found['filesystem']['type']}; {versions}.{lacks}"
    )
