"""Runs one column of a comparison: the user's command in fresh processes, watched from outside.

Knows processes, environments and printed losses; neither tables, nor how the command uses its
environment.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil

from memascend.config.environment import CONFIG_VARIABLE, DISABLE_VARIABLE, TRACE_VARIABLE
from memascend.ledger.trace import Recording, read_recording
from memascend.system.files import open_anew
from memascend.system.processes import (
    DriveSample,
    IoCounter,
    Peaks,
    Sample,
    TreeSampler,
    process_tree,
)

TERMINATE_GRACE_S = 20.0

# "loss 1.5", "loss: 1.5", "loss=1.5", {'loss': '1.5'}; not "eval_loss", not "loss scale".
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf)"
_LOSS = re.compile(rf"(?<![\w-])loss['\"]?\s*[:=]?\s*['\"]?({_NUMBER})(?!\w)", re.IGNORECASE)
_ARMED = re.compile(r"\bmemascend \S+ armed: ")


@dataclass(frozen=True, slots=True)
class Column:
    """One way to run the command."""

    name: str
    environment: Mapping[str, str]  # variables set for it
    expects_plugin: bool = False  # whether a run in which memascend never spoke is a failure


@dataclass(slots=True)
class Run:
    """One outcome of a column; filled while it runs."""

    column: Column
    log: Path
    number: int = 0  # number of the run within its column, from 1; 0 for the only one
    started_s: float = 0.0  # on the clock that all processes share
    exit_status: int = -1
    elapsed_s: float = 0.0
    #: The printed losses, as text: equality of runs is equality of every digit.
    losses: list[str] = field(default_factory=list)
    exact_losses: list[str] = field(default_factory=list)  # of trainer_state.json, if it has them
    loss_times_s: list[float] = field(default_factory=list)  # when it printed each, since its start
    samples: list[Sample] = field(default_factory=list)
    #: Samples of the drives that it offloads to.
    drive_samples: list[DriveSample] = field(default_factory=list)
    peaks: Peaks = field(default_factory=Peaks)
    io_bytes: tuple[int, int] | None = None  # (read, written) by all its processes; None if unknown
    recording: Recording = field(default_factory=Recording)  # by memascend; empty if it is off
    problem: str = ""  # why it does not count, empty when it does

    @property
    def name(self) -> str:
        """The column's, with the number where there are several."""
        return f"{self.column.name} {self.number}" if self.number else self.column.name

    @property
    def step_times_s(self) -> list[float]:
        """Seconds between one printed loss and the next: every step but the first."""
        times = self.loss_times_s
        return [after - before for before, after in pairwise(times)]


def columns_by_name(*, config_has_block: bool) -> dict[str, Column]:
    """Return the known columns.

    A configuration without a block gets one through the environment: the caller's own
    MEMASCEND_CONFIG if there is one, so that one key can be tried out, else an empty block.
    """
    supplied = os.environ.get(CONFIG_VARIABLE, "" if config_has_block else "{}")
    tuned = {
        "DS_PIN_MEMORY_BACKEND": "native",
        "PYTORCH_ALLOC_CONF": "pinned_max_round_threshold_mb:1",
    }
    return {
        "stock": Column("stock", {DISABLE_VARIABLE: "1"}),
        "memascend": Column(
            "memascend", {CONFIG_VARIABLE: supplied} if supplied else {}, expects_plugin=True
        ),
        "stock-tuned": Column("stock-tuned", {DISABLE_VARIABLE: "1", **tuned}),
    }


def run_column(
    column: Column,
    command: Sequence[str],
    *,
    log: Path,
    folders: Sequence[Path],
    interval_s: float,
    on_line: Callable[[Run, str], None],
    number: int = 0,
) -> Run:
    """Run the command to its end and record what it printed and used.

    The folder for the marks that memascend records is removed on return.
    Every line of output goes to `log` and to `on_line`. A command that cannot be started,
    that fails, or in which an expected plugin stayed silent leaves a `problem`, not an exception.
    """
    run, counter = Run(column, log, number), IoCounter()
    with tempfile.TemporaryDirectory(prefix="memascend-compare-") as traces:
        traced = {TRACE_VARIABLE: traces} if column.expects_plugin else {}
        environment = child_environment({**column.environment, **traced})
        run.started_s = time.monotonic()
        started_at = time.time()  # before it may write
        try:
            process = start(command, environment, start_new_session=True)
        except OSError as error:
            run.problem = f"cannot start {shlex.join(command)}: {error.strerror}"
            return run
        sampler = TreeSampler(process.pid, interval_s=interval_s, folders=folders, since=started_at)
        sampler.start()
        # Shared with the sampler's thread, which only appends: the live line shows the latest.
        run.samples, run.drive_samples = sampler.samples, sampler.drive_samples
        try:
            has_armed = _follow(process, run, on_line)
        except BaseException:
            terminate_tree(process)
            raise
        finally:
            run.exit_status = process.wait()
            run.elapsed_s = time.monotonic() - run.started_s
            sampler.stop()
        run.recording = read_recording(Path(traces))
    run.peaks = sampler.peaks
    run.io_bytes = counter.read_and_written_bytes()
    if run.exit_status != 0:
        run.problem = f"exit status {run.exit_status}" + _signal_name(run.exit_status)
    elif column.expects_plugin and not has_armed:
        run.problem = (
            "memascend did not log that it was armed: this run was stock as well. Likely cause: "
            "it is not installed where the command runs. Check there with: memascend doctor"
        )
    return run


def start(
    command: Sequence[str], environment: Mapping[str, str], *, start_new_session: bool = False
) -> subprocess.Popen[str]:
    """Start a command whose output, errors included, is read line by line."""
    return subprocess.Popen(
        list(command),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=start_new_session,
    )


def find_losses(line: str) -> list[str]:
    """Return the training losses printed in a line of output, as text."""
    return [match.group(1) for match in _LOSS.finditer(line)]


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Return our environment with a column's changes, and launchers found beside our own python."""
    environment = dict(os.environ)
    for name in (CONFIG_VARIABLE, DISABLE_VARIABLE, TRACE_VARIABLE):
        environment.pop(name, None)
    beside_python = str(Path(sys.executable).parent)
    environment["PATH"] = os.pathsep.join([beside_python, environment.get("PATH", os.defpath)])
    environment["PYTHONUNBUFFERED"] = "1"  # or the losses arrive all at once, at the end
    environment.update(changes)
    return environment


def terminate_tree(process: subprocess.Popen[str]) -> None:
    """Ask the command and all its descendants to end, and kill them after a while."""
    alive = []
    for pid in process_tree(process.pid):
        with contextlib.suppress(psutil.Error):
            alive.append(psutil.Process(pid))
    for send in (psutil.Process.terminate, psutil.Process.kill):
        for member in alive:
            with contextlib.suppress(psutil.Error):
                send(member)
        _, alive = psutil.wait_procs(alive, timeout=TERMINATE_GRACE_S)


def _follow(process: subprocess.Popen[str], run: Run, on_line: Callable[[Run, str], None]) -> bool:
    """Read the output to its end; return whether memascend's own line was in it."""
    has_armed = False
    assert process.stdout is not None
    with open(open_anew(run.log), "w", encoding="utf-8") as log:
        for line in process.stdout:
            log.write(line)
            log.flush()
            found = find_losses(line)
            run.losses += found
            run.loss_times_s += [time.monotonic() - run.started_s] * len(found)
            has_armed = has_armed or _ARMED.search(line) is not None
            on_line(run, line.rstrip())
    return has_armed


def _signal_name(exit_status: int) -> str:
    if exit_status >= 0:
        return ""
    with contextlib.suppress(ValueError):
        return f" ({signal.Signals(-exit_status).name})"
    return ""
