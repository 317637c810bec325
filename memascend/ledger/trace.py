"""The trace of a run: how long each phase of each step took, and what stood in memory then.

One line of JSON for the end of each phase, in a file of its own for each model of rank 0, written
where MEMASCEND_TRACE names a folder: `memascend compare` does, and reads it. Writing one costs some
system calls for each phase; without the variable nothing is asked and nothing written.

Writer and reader are here together, so that nobody else knows the form. Used by one thread.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, TextIO

from memascend import _core
from memascend.base.json_text import parse_json
from memascend.system.files import open_new

FORWARD, BACKWARD, OPTIMIZER, OTHER = "forward", "backward", "optimizer", "other"
#: The phases of a step, in their order; what the program does between two steps is the last.
PHASES = (FORWARD, BACKWARD, OPTIMIZER, OTHER)
#: While the model is built.
SETUP = "setup"

FILES_MAX = 1000  # of one folder: models of one run
_SUFFIX = ".trace.jsonl"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Measures:
    """The counters of one rank at one moment; all but memory are totals since the start.

    Attributes:
        components: Live host bytes by component.
        read_bytes: That the drives read.
        written_bytes: That they wrote.
        drive_wait_s: Seconds in which training waited for them.
        device_wait_s: Seconds in which some thread of ours waited for the device.
        optimizer_wait_s: Seconds in which training waited for steps that go on behind it.
    """

    components: Mapping[str, int] = field(default_factory=dict)
    read_bytes: int = 0
    written_bytes: int = 0
    drive_wait_s: float = 0.0
    device_wait_s: float = 0.0
    optimizer_wait_s: float = 0.0


def measures_of(
    *,
    allocator: _core.Allocator | None,
    store: _core.Store | None,
    device_wait_s: float,
    optimizer_wait_s: float,
) -> Measures:
    """Return the counters of what a rank has; without an allocator or a store theirs are zero."""
    components = allocator.components() if allocator is not None else {}
    drive = store.stats() if store is not None else {}
    return Measures(
        components={name: found.live_bytes for name, found in components.items()},
        read_bytes=int(drive.get("bytes_read", 0)),
        written_bytes=int(drive.get("bytes_written", 0)),
        drive_wait_s=drive.get("wait_seconds", 0.0),
        device_wait_s=device_wait_s,
        optimizer_wait_s=optimizer_wait_s,
    )


@dataclass(frozen=True, slots=True)
class Mark:
    """The end of a phase.

    Attributes:
        time_s: On the clock that all processes of a machine share.
        phase: Which one ended: one of PHASES, or SETUP.
    """

    time_s: float
    phase: str
    measures: Measures


@dataclass(frozen=True, slots=True)
class Recording:
    """What a run has left of itself.

    Attributes:
        marks: In their order.
        ledger: The account at its end, as the ledger writes it; empty where it did not get there.
    """

    marks: Sequence[Mark] = ()
    ledger: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step_count(self) -> int:
        """Optimizer steps that were ended."""
        return sum(mark.phase == OPTIMIZER for mark in self.marks)


class Trace:
    """The file that one model's marks go to. A drive that refuses them ends it, not the run."""

    def __init__(
        self, folder: Path, read: Callable[[], Measures], clock: Callable[[], float] = monotonic
    ) -> None:
        """Begin a file, and note the start.

        Args:
            folder: Where; it is there already.
            read: Gives the counters.
            clock: Gives seconds.
        """
        self._read, self._clock = read, clock
        self._rest = SETUP  # the phase that whatever comes before the next one belongs to
        self._components: Mapping[str, int] | None = None
        self._file: TextIO | None = _open(folder)
        self.mark()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Stand around a forward pass or an optimizer step.

        Backward is what lies between a forward pass and what follows it: autograd has no end that
        a program without hooks could know.
        """
        self.mark()
        self._rest = name
        try:
            yield
        finally:
            self.mark()
            self._rest = BACKWARD if name == FORWARD else OTHER

    def mark(self) -> None:
        """Note the end of what went on until now."""
        measures = self._read()
        line = {"time_s": self._clock(), "phase": self._rest, **asdict(measures)}
        if measures.components == self._components:
            del line["components"]
        self._components = measures.components
        self._write(line)

    def end(self, ledger: Mapping[str, Any]) -> None:
        """Note the account at the end of the run; nothing is noted after it."""
        self.mark()
        self._write({"ledger": ledger})
        self._close()

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:
            log.warning("memascend: the trace ends here: %s", error.strerror)
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()


def read_recording(folder: Path) -> Recording:
    """Return what the run with this folder has left; of several models the one with most steps.

    Lines that a killed process left half-written are passed over.
    """
    found = [_read(path) for path in sorted(folder.glob(f"*{_SUFFIX}"))[:FILES_MAX]]
    return max(found, key=lambda recording: recording.step_count, default=Recording())


def _open(folder: Path) -> TextIO | None:
    for number in range(FILES_MAX):
        path = folder / f"{os.getpid()}-{number}{_SUFFIX}"
        try:
            return open(open_new(path), "w", encoding="utf-8", buffering=1)
        except FileExistsError:
            continue
        except OSError as error:
            log.warning("memascend: MEMASCEND_TRACE=%s has no trace: %s", folder, error.strerror)
            break
    return None


def _read(path: Path) -> Recording:
    marks: list[Mark] = []
    ledger: dict[str, Any] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        lines = []
    components: Mapping[str, int] = {}
    for text in lines:
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            line: Any = parse_json(text)
            if "ledger" in line:
                ledger = dict(line["ledger"])
                continue
            components = line.pop("components", components)
            time_s, phase = float(line.pop("time_s")), str(line.pop("phase"))
            marks.append(Mark(time_s, phase, Measures(components=components, **line)))
    return Recording(marks, ledger)
