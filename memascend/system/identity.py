"""Identifies the process that wrote a file, so that a reader can tell if it still runs.

Process numbers are reused, so the start time belongs to the identity. A number is valid only on one
machine, for one boot, and in one PID namespace.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from memascend.system.mounts import PROC, read_line, read_lines

_START_TIME_FIELD = 22  # of /proc/PID/stat, counted from 1


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of one machine."""

    host: str  # name of the machine
    boot: str  # the kernel's random id of the boot
    namespace: str  # PID namespace of the number; containers have their own
    pid: int  # process number in that namespace
    started: int  # start time, in clock ticks since the boot

    def is_alive(self, proc: Path = PROC) -> bool | None:
        """Return whether it runs; None if this process cannot know, as on another machine."""
        here = identify(os.getpid(), proc)
        if self.host != here.host:
            return None
        if self.boot != here.boot:
            return False
        if self.namespace != here.namespace:
            return None
        return self.started != 0 and identify(self.pid, proc).started == self.started


def identify(pid: int, proc: Path = PROC) -> ProcessIdentity:
    """Return the identity of a process of this machine; `started` is 0 if it does not run."""
    try:
        namespace = os.readlink(proc / "self/ns/pid")
    except OSError:
        namespace = ""
    return ProcessIdentity(
        host=platform.node(),
        boot=read_line(proc / "sys/kernel/random/boot_id"),
        namespace=namespace,
        pid=pid,
        started=_start_time(" ".join(read_lines(proc / str(pid) / "stat"))),
    )


def _start_time(text: str) -> int:
    # The second field is the program's name, in parentheses; the name may contain parentheses.
    state, *fields = text.rpartition(")")[2].split() or [""]
    if state in ("", "Z", "X"):  # gone, or waiting to be reaped
        return 0
    return int(fields[_START_TIME_FIELD - 4])
