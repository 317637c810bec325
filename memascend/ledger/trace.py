"""The trace of a run: the end of each phase of each step, with the counters at that moment.

Each model of rank 0 has a file in the folder that MEMASCEND_TRACE names, with one line of JSON for
each phase. `memascend compare` sets the variable and reads the files. A line costs a few system
calls; without the variable nothing is read or written.

Only this module knows the format. Used by one thread.
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

from memascend.base.json_text import parse_json
from memascend.system.files import open_new

FORWARD, BACKWARD, OPTIMIZER, OTHER = "forward", "backward", "optimizer", "other"
#: The phases of a step, in their order; OTHER is the time between two steps.
PHASES = (FORWARD, BACKWARD, OPTIMIZER, OTHER)
#: While the model is built.
SETUP = "setup"

FILES_MAX = 1000  # of one folder: models of one run
_SUFFIX = ".trace.jsonl"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Measures:
    """The counters of one rank at one moment; all but memory are totals since the start."""

    components: Mapping[str, int] = field(default_factory=dict)  # live host bytes by component
    read_bytes: int = 0  # bytes that the drives read
    written_bytes: int = 0  # bytes that the drives wrote
    drive_wait_s: float = 0.0  # seconds that training waited for the drives
    device_wait_s: float = 0.0  # seconds that threads of ours waited for the device
    optimizer_wait_s: float = 0.0  # seconds that training waited for background optimizer steps


@dataclass(frozen=True, slots=True)
class Mark:
    """The end of a phase."""

    time_s: float  # seconds on the clock that all processes of a machine share
    phase: str  # the phase that ended: one of PHASES, or SETUP
    measures: Measures  # the counters at that moment


@dataclass(frozen=True, slots=True)
class Recording:
    """The trace of one model, as read from its file."""

    marks: Sequence[Mark] = ()  # the ends of phases, in their order
    #: The account at the end of the run, as `Ledger.as_dict`; empty if the run was killed.
    ledger: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step_count(self) -> int:
        """Optimizer steps that ended."""
        return sum(mark.phase == OPTIMIZER for mark in self.marks)


class Trace:
    """The trace file of one model. If a write fails, the trace ends and the run continues."""

    def __init__(
        self, folder: Path, read: Callable[[], Measures], clock: Callable[[], float] = monotonic
    ) -> None:
        """Create the file in an existing folder, and write the first mark."""
        self._read, self._clock = read, clock
        self._rest = SETUP  # the phase that the next mark ends
        self._components: Mapping[str, int] | None = None
        self._file: TextIO | None = _open(folder)
        self.mark()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark the begin and the end of a forward pass or an optimizer step.

        The time from the end of a forward pass to the next phase counts as backward: without hooks
        a program cannot know when autograd ends.
        """
        self.mark()
        self._rest = name
        try:
            yield
        finally:
            self.mark()
            self._rest = BACKWARD if name == FORWARD else OTHER

    def mark(self) -> None:
        """Write the end of the current phase."""
        measures = self._read()
        line = {"time_s": self._clock(), "phase": self._rest, **asdict(measures)}
        if measures.components == self._components:
            del line["components"]
        self._components = measures.components
        self._write(line)

    def end(self, ledger: Mapping[str, Any]) -> None:
        """Write the account at the end of the run, and close the file."""
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
    """Return the trace of a run; if it has several models, the one with the most steps.

    Incomplete lines of a killed process are skipped.
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
