"""Groups of living DeepSpeed processes: a case costs seconds and not an import of DeepSpeed.

One group per world size, started at its first case and kept for the whole test run. A case that
raises, crashes or hangs fails alone, with its log: the group is then killed and the next case gets
a new one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from memascend.config.installed import ABILITIES, installed_version, is_able
from tests.support import quick_start
from tests.support.ports import free_port

from .cases import Backend, Case, deepspeed_json

REPOSITORY = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 240.0  # the first start on a machine compiles DeepSpeed's communication op
CASE_TIMEOUT_S = 150.0
COMPILE_TIMEOUT_S = 450.0  # the first case of an optimizer whose op no start has loaded
COMPILED = ("Lion", "Adagrad")
STOP_TIMEOUT_S = 30.0  # to end by itself, and again after SIGTERM
#: How an older release ends a case: settings that are refused by name, and DeepSpeed's own drives,
#: which end the process where no device locks pages.
LIMITS = (
    r"ConfigError: (.* needs DeepSpeed \S+ or later), and",
    r"(swap_tensor/utils\.py\", line \d+, in __init__\n\s+assert all\(.*is_pinned)",
    r"(deepspeed_io_handle_t::(?:wait|_stop_threads)\(\): Assertion .* failed)",
)
LOCK_RELEASE_S = 0.5
STACK_DUMP_S = 1.0
LOG_TAIL_LINES = 120
# Freed memory stays with the process. Given back at once, as memascend has it and its own tests
# see, each tensor would take its pages anew: a third of the time of all cases, and no bit differs.
HEAP = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
    # malloc fills freed memory with other bytes, so that a use after free shows in the results.
    "MALLOC_PERTURB_": "165",
}
# This is what all groups of a test process may take together; several such processes run beside
# each other. A rank grows a little from case to case.
RESIDENT_BYTES_MAX = 4 << 30

Facts = dict[str, Any]
# Facts about how a case was run; all others are about what came of it, and must be equal.
HOW_FACTS = (
    *("placement", "optimizer_class", "swapper_classes", "ledger", "state_dict", "warnings"),
    *("findings", "waits", "walks", "early_tile_count", "gathered_beside", "host_looks"),
    "applies_updates",
    "step_losses",  # sums of losses, in another order
)


class CaseFailed(RuntimeError):
    """A worker raised, died or hung while it ran a case."""


class WorkerGroup:
    """`world` ranks that run one case after another."""

    _living: ClassVar[list[WorkerGroup]] = []  # of this process; used last, last

    def __init__(
        self,
        *,
        world: int,
        folder: Path,
        memlock_bytes: int | None = None,
        program: str = "tests.parity.worker",
    ) -> None:
        self.world = world
        self.program = program
        self.folder = folder
        self.memlock_bytes = memlock_bytes
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._start_count = 0

    def run(
        self, case: Case, config: dict[str, Any], *, timeout_s: float, **options: Any
    ) -> list[Facts]:
        """The facts of every rank, rank 0 first; `options` are those of the program."""
        self._ensure_running()
        log_offsets = [path.stat().st_size for path in self._log_paths()]
        try:
            for connection in self._connections:
                connection.send((dataclasses.asdict(case), config, options))
            answers = self._receive(timeout_s)
        except (OSError, EOFError) as error:
            answers = [{"error": f"{error!r}: exit codes {self._exit_codes()}"}]
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            self.stop()
            logs = self._logs_since(log_offsets)
            raise CaseFailed(f"{case.name}\n" + "\n".join(errors) + logs)
        self._make_room()
        return [answer["facts"] for answer in answers]

    def _make_room(self) -> None:
        """Stop groups until all fit together, the one that was used longest ago first."""
        self._living.remove(self)
        self._living.append(self)
        while sum(group._resident_bytes() for group in self._living) > RESIDENT_BYTES_MAX:
            self._living[0].stop()

    def _resident_bytes(self) -> int:
        living = [process for process in self._processes if process.poll() is None]
        return sum(psutil.Process(process.pid).memory_info().rss for process in living)

    def stop(self) -> None:
        """End the ranks: a closed socket tells them to, then SIGTERM, then SIGKILL.

        A rank that is killed while it loads an op leaves a lock; SIGTERM lets it clean up.
        """
        for connection in self._connections:
            connection.close()
        if not self._all_ended():
            for process in self._processes:
                process.terminate()
            if not self._all_ended():
                for process in self._processes:
                    process.kill()
        for process in self._processes:
            process.wait()
        self._connections, self._processes = [], []
        if self in self._living:
            self._living.remove(self)

    def _all_ended(self) -> bool:
        """Whether every rank ends in time."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while None in self._exit_codes():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def _ensure_running(self) -> None:
        if self._processes and self._exit_codes() == [None] * self.world:
            return
        self.stop()
        self._living.append(self)
        environment = worker_environment(rank=0, world=self.world, port=0)
        remove_stale_locks(Path(environment["TORCH_EXTENSIONS_DIR"]))
        self._start_count += 1
        port = free_port()
        for rank in range(self.world):
            self._start_rank(rank, port)
        try:
            answers = self._receive(START_TIMEOUT_S)
        except (OSError, EOFError) as error:
            answers = [f"{error!r}: exit codes {self._exit_codes()}"]
        if answers != ["ready"] * self.world:
            self.stop()
            raise CaseFailed(
                f"workers did not start: {answers}{self._logs_since([0] * self.world)}"
            )

    def _start_rank(self, rank: int, port: int) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", self.program, "--socket", str(theirs.fileno())]
        if self.memlock_bytes is not None:
            command += ["--memlock-bytes", str(self.memlock_bytes)]
        with theirs, self._log_paths()[rank].open("wb") as log:
            process = subprocess.Popen(
                command,
                env=worker_environment(rank=rank, world=self.world, port=port),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._processes.append(process)
        self._connections.append(Connection(ours.detach()))

    def _receive(self, timeout_s: float) -> list[Any]:
        """One answer per rank. The first error ends the wait: other ranks may hang on it."""
        deadline = time.monotonic() + timeout_s
        answers = []
        waiting = dict(enumerate(self._connections))
        while waiting:
            for rank, connection in list(waiting.items()):
                if not connection.poll(0.02):
                    continue
                answer = connection.recv()
                if "error" in answer:
                    return [answer]
                answers.append((rank, answer))
                del waiting[rank]
            if time.monotonic() > deadline and waiting:
                self._dump_stacks()
                return [{"error": f"ranks {sorted(waiting)} gave no answer within {timeout_s} s"}]
        return [answer for _, answer in sorted(answers, key=lambda pair: pair[0])]

    def _dump_stacks(self) -> None:
        """Have the ranks that still live write to their logs where they hang."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)
        time.sleep(STACK_DUMP_S)

    def _exit_codes(self) -> list[int | None]:
        return [process.poll() for process in self._processes]

    def _log_paths(self) -> list[Path]:
        stem = f"world{self.world}-start{self._start_count}"
        return [self.folder / f"{stem}-rank{rank}.log" for rank in range(self.world)]

    def _logs_since(self, offsets: list[int]) -> str:
        text = ""
        for rank, (path, offset) in enumerate(zip(self._log_paths(), offsets, strict=True)):
            lines = path.read_bytes()[offset:].decode(errors="replace").splitlines()
            text += f"\n--- log of rank {rank} ---\n" + "\n".join(lines[-LOG_TAIL_LINES:])
        return text


class Bench:
    """Runs cases on any backend and remembers what the oracle said."""

    def __init__(self, folder: Path, program: str = "tests.parity.worker") -> None:
        self.folder = folder
        self.program = program
        self._groups: dict[int, WorkerGroup] = {}
        self._oracles: dict[Case, list[Facts]] = {}
        self._run_count = 0

    def run(
        self, case: Case, backend: Backend, *, timeout_s: float | None = None, **options: Any
    ) -> list[Facts]:
        """The facts of every rank; the group of the case's world size is started if need be."""
        if timeout_s is None:
            is_compiled = case.optimizer_type in COMPILED
            timeout_s = COMPILE_TIMEOUT_S if is_compiled else CASE_TIMEOUT_S
        if backend == "oracle" and case.oracle() in self._oracles:
            return self._oracles[case.oracle()]
        if case.world not in self._groups:
            self._groups[case.world] = WorkerGroup(
                world=case.world, folder=self.folder, program=self.program
            )
        nvme_path = self.new_nvme_path()
        config = deepspeed_json(case, backend, str(nvme_path))
        subject = case.oracle() if backend == "oracle" else case
        if subject.resume_at or subject.save_at:
            folder = str(nvme_path / "checkpoints")
            subject = dataclasses.replace(subject, checkpoint_folder=folder)
        try:
            facts = self._groups[case.world].run(subject, config, timeout_s=timeout_s, **options)
        except CaseFailed as error:
            skip_what_the_release_lacks(str(error))
            if backend == "memascend" and not is_newest():
                with contextlib.suppress(CaseFailed):
                    self.run(case, "oracle")
            elif backend == "oracle":
                skip_what_cpu_offload_fails(str(error))
            raise
        shutil.rmtree(nvme_path, ignore_errors=True)
        if backend == "oracle":
            self._oracles[case.oracle()] = facts
        return facts

    def new_nvme_path(self) -> Path:
        self._run_count += 1
        path = self.folder / f"nvme{self._run_count}"
        path.mkdir()
        return path

    def stop(self) -> None:
        for group in self._groups.values():
            group.stop()


def is_newest() -> bool:
    """Whether the release has every ability that memascend asks for."""
    return all(map(is_able, ABILITIES))


def skip_what_cpu_offload_fails(error: str) -> None:
    """Skip a test in which CPU offload of an older release fails: nothing to compare with."""
    # Without an error of its own it may have run out of time on a busy machine.
    found = re.search(r"^[\w.]+Error: .*", error, re.MULTILINE)
    if found and not is_newest():
        pytest.skip(f"with DeepSpeed {installed_version()}: CPU offload fails too: {found[0]}")


def skip_what_the_release_lacks(error: str) -> None:
    """Skip a test that fails by a known limit of an older release, which the error names."""
    limits = (re.search(limit, error) for limit in LIMITS)
    found = next(filter(None, limits), None)
    if found and not is_newest():
        pytest.skip(f"with DeepSpeed {installed_version()}: {found[1]}")


def differences(subject: list[Facts], oracle: list[Facts]) -> list[str]:
    """Where two runs of one case differ, in words; empty when every bit is the same."""
    found = []
    for rank, (left, right) in enumerate(zip(subject, oracle, strict=True)):
        for fact, expected in right.items():
            if fact in HOW_FACTS or left[fact] == expected:
                continue
            where = left[fact]
            if isinstance(expected, dict):
                where = sorted(key for key in expected if left[fact].get(key) != expected[key])
            found.append(f"rank {rank}: {fact}: {where} instead of the oracle's {expected}")
    return found


def remove_stale_locks(folder: Path) -> None:
    """Remove the locks on compiled ops in `folder` that no living process can ever release.

    Such a lock is left by a process that was killed while torch loaded an op; every other process
    waits for it. torch keeps a lock open for as long as it holds it, and removes it right after it
    has closed it.
    """
    stale = _not_open(folder.glob("*/lock"))
    if stale:
        time.sleep(LOCK_RELEASE_S)  # its owner may have been about to remove it
        for lock in _not_open(stale):
            lock.unlink(missing_ok=True)


def _not_open(paths: Iterable[Path]) -> list[Path]:
    """Those that exist and that no process has open, as far as this user can see."""
    found = [path.resolve() for path in paths if path.exists()]
    if not found:
        return []
    held = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            held.update(Path(file.path) for file in process.open_files())
    return [path for path in found if path not in held]


def worker_environment(*, rank: int, world: int, port: int) -> dict[str, str]:
    """One thread per rank, one instruction path in MKL: equal bits must not depend on chance."""
    environment = dict(os.environ)
    environment.setdefault("DS_ACCELERATOR", "cpu")
    environment.setdefault("TORCH_EXTENSIONS_DIR", str(REPOSITORY / ".venv" / "torch_extensions"))
    inherited = environment.get("PYTHONPATH", "").split(os.pathsep)
    # Some cases are compiled.
    search_path = [
        str(REPOSITORY),
        *(path for path in inherited if path != str(quick_start.FOLDER)),
    ]
    # ninja, which DeepSpeed needs to load its ops, lies beside the interpreter.
    programs = [str(Path(sys.executable).parent), environment.get("PATH", "")]
    return environment | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "MKL_CBWR": "AVX2,STRICT",
        **HEAP,
        "PYTHONPATH": os.pathsep.join(filter(None, search_path)),
        "PATH": os.pathsep.join(filter(None, programs)),
    }
