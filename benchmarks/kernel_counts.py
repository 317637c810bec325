"""This process's memory and traffic as the kernel counts them, as far as it does.

Sandboxes lack some of the kernel's files. The figures are the best that is left then, and `lacks`
states which they are: it belongs into every record. Light, since training programs that measure
their own memory import it.
"""

from __future__ import annotations

import os
from pathlib import Path

from memascend.system.memory import process_status
from memascend.system.mounts import read_lines

#: Writing 5 to it resets this process's high-water mark of resident memory to the present size.
CLEAR_REFS = Path("/proc/self/clear_refs")
IO = Path("/proc/self/io")


def reset_host_peak() -> str:
    """Reset this process's high-water mark of resident memory; return why not, or ""."""
    try:
        CLEAR_REFS.write_text("5")
    except OSError as error:
        return f"{CLEAR_REFS}: {error.strerror}"
    return "" if "VmHWM" in process_status(os.getpid()) else "/proc/self/status has no VmHWM"


def host_peak_bytes() -> int:
    """Return the most resident memory since the last reset; without the kernel's mark, the present.

    Raises:
        KeyError: The kernel states neither.
    """
    status = process_status(os.getpid())
    return status["VmHWM"] if "VmHWM" in status else status["VmRSS"]


def storage_bytes() -> tuple[int, int]:
    """Return the bytes that this process has read from storage and written to it, else zeros."""
    counts = dict(line.split(": ", 1) for line in read_lines(IO) if ": " in line)
    return int(counts.get("read_bytes", 0)), int(counts.get("write_bytes", 0))


def lacks() -> dict[str, str]:
    """Return the kinds of figures that are not exact here, each with the reason."""
    found = {}
    if reason := reset_host_peak():
        found["peaks of host memory"] = (
            f"not of single steps or runs, but since the process began ({reason})"
        )
    if not read_lines(IO):
        found["traffic of the drive"] = f"counted as 0 ({IO} is missing)"
    return found
