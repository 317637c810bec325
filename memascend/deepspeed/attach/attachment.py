"""The attachment: one model's runtime in DeepSpeed, its status, and its report at the end."""

from __future__ import annotations

import atexit
import logging
import os
import platform
import sys
import tempfile
import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from memascend.config.environment import local_rank, local_world_size
from memascend.deepspeed.attach import process
from memascend.deepspeed.attach.lone_failure import lone_failures
from memascend.deepspeed.stock.aio_handle import serving
from memascend.deepspeed.stock.host_buffers import HostBuffers
from memascend.ledger.drives import DriveWatch
from memascend.ledger.ledger import Ledger, describe_plan
from memascend.ledger.trace import Trace
from memascend.monitor.status_file import RankPlace, StatusFile
from memascend.plan.derive import Plan
from memascend.runtime import Runtime
from memascend.system.heap import Heap
from memascend.volumes.directory import provide_directory

log = logging.getLogger(__name__)


class Attachment:
    """One model's runtime, as its parameter swapper and its optimizer use it; they share one."""

    def __init__(
        self,
        runtime: Runtime,
        drives: DriveWatch | None = None,
        heap: Heap | None = None,
        trace: Trace | None = None,
        place: RankPlace | None = None,
    ) -> None:
        self.runtime = runtime
        #: Set by memascend/deepspeed/slices/engine.py; None until a forward pass in slices.
        self.slices: Any = None
        #: Passes and steps that failed on one rank alone; None with one rank.
        self.failures = lone_failures(runtime.new_event)
        self.status = None if place is None else _status_file(weakref.ref(self), place)
        self._heap = heap
        self._drives = drives
        self._rank = dist.get_rank()
        self._speaks = speaks_for_machine(self._rank)
        self._report = self._claim_report()
        self.begin()
        self._trace = trace
        # For scripts that end without engine.destroy().
        atexit.register(_finish, weakref.ref(self), os.getpid())
        self._host_buffers = HostBuffers(runtime.memory)

    def ledger(self) -> Ledger:
        """Return our host memory by component, planned and measured, and the traffic."""
        return replace(
            self.runtime.ledger(),
            machine=platform.node(),
            drives=() if self._drives is None else self._drives.drives,
            heap="" if self._heap is None else self._heap.describe(),
            device_bytes_peak=_device_bytes_peak(),
        )

    def endurance_left_bytes(self) -> int | None:
        """Return the bytes that all drives may still be written, by their SMART data; else None."""
        left = [] if self._drives is None else [one.left_bytes for one in self._drives.drives]
        known = [nbytes for nbytes in left if nbytes is not None]
        return sum(known) if known and len(known) == len(left) else None

    def adopt(self, plan: Plan) -> None:
        """Resize the runtime's memory to the plan, and log the plan on rank 0."""
        if self._trace is not None:
            self._trace.mark()  # the sizes used while the model was built
        self.runtime.adopt(plan)
        if self._trace is not None:
            self._trace.mark()
        if self._rank == 0:
            log.info("memascend: host memory of this rank:\n%s", describe_plan(plan))

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Return a context that the trace records as a phase of a step."""
        return nullcontext() if self._trace is None else self._trace.phase(name)

    def note_step(self) -> None:
        """Count an optimizer step; warn once on each machine if its write budget is exceeded."""
        wear = self.runtime.note_step()
        if wear is not None and self._speaks:
            stops = self.runtime.config.wear.over_budget == "stop"
            after = (
                "Training stops after the next checkpoint, and writes on until then: save one"
                if stops
                else 'Training continues; "over_budget": "stop" ends it after the next checkpoint'
            )
            log.warning(
                "memascend: over memascend.wear.write_budget: %s. %s", wear.describe(), after
            )

    def is_to_stop(self) -> bool:
        """Return whether the write budget is exceeded and `over_budget` is "stop"."""
        wear = self.runtime.read_wear()
        stops = self.runtime.config.wear.over_budget == "stop"
        return stops and wear is not None and wear.is_over_budget

    def begin(self) -> None:
        """Note that the model is active: a new one, or one with a new engine."""
        self._is_finished = False
        process.join(self, self.runtime.limit_bytes)

    def leave(self) -> None:
        """Note that an engine of this model was destroyed; another may still train the model."""
        process.leave(self)
        self._close_failures()
        if self.status is not None:
            self.status.finish()

    def finish(self, *, is_well: bool = True) -> None:
        """Note that this rank is finished; log and write the ledger, once on each machine.

        If an error ended the program, `is_well` is False, and the status shows a dead rank.
        """
        self._tell_what_failed_last()
        process.leave(self)
        self._close_failures()
        if self.status is not None and is_well:
            self.status.finish()
        if self._is_finished or not self._speaks:
            return
        self._is_finished = True
        if self._drives is not None:
            self._drives.end()
        ledger = self.ledger()
        if self._trace is not None:
            self._trace.end(ledger.as_dict())
        whose = f"rank {self._rank}, the first on {ledger.machine}" if self._rank else "this rank"
        log.info("memascend: host memory of %s, measured:\n%s", whose, ledger.describe())
        if self._report is not None:
            try:
                ledger.write(self._report)
            except OSError as error:
                log.error(
                    "memascend: cannot write memascend.report=%r: %s. The log line before this one "
                    "has the same numbers",
                    str(self._report),
                    error.strerror or error,
                )

    def _close_failures(self) -> None:
        if self.failures is not None:
            self.failures.close()

    def _claim_report(self) -> Path | None:
        """Return the file of this model's report; None if this rank writes none."""
        if self.runtime.config.report is None or not self._speaks:
            return None
        named = report_of_rank(Path(self.runtime.config.report), self._rank)
        claimed = process.claim_report(named)
        if claimed != named.absolute():
            log.info(
                "memascend: the report of this model will be in %s: %s is the report of another "
                "model of this process",
                claimed,
                named,
            )
        return claimed

    def _tell_what_failed_last(self) -> None:
        """Log an error of the last step that was not raised yet, before the program ends."""
        try:
            self.runtime.background.finish()
        except Exception:
            log.exception(
                "memascend: rank %d: the last optimizer step failed. fix: resume from the last "
                "checkpoint; nothing was saved since",
                self._rank,
            )

    def host_buffers(self, component: str | None) -> AbstractContextManager[None]:
        """Return a context in which DeepSpeed's host buffers are in the arena; None: not there."""
        return self._host_buffers(component) if self.runtime.host.is_ours else nullcontext()

    def serving_aio(self, component: str) -> AbstractContextManager[None]:
        """Return a context in which DeepSpeed's swappers use our store."""
        if not self.runtime.drive.is_ours:
            return nullcontext()
        return serving(store=self.runtime.io, memory=self.runtime.memory, component=component)

    def staging_folder(self, nvme_path: str) -> str:
        """Return a folder for DeepSpeed's optimizer files; an empty one if our store keeps them."""
        if not self.runtime.drive.is_ours:
            return os.path.join(nvme_path, "zero_stage_3")
        # As stock, which creates missing folders. It need not be the store's folder.
        provide_directory(nvme_path)
        return tempfile.mkdtemp(prefix=f"memascend-{os.getpid()}-", dir=nvme_path)


def speaks_for_machine(rank: int) -> bool:
    """Return whether a rank reports for its machine: one on each, since drives are local."""
    is_on_another = rank >= local_world_size()
    return rank == 0 or (is_on_another and local_rank() == 0)


def report_of_rank(report: Path, rank: int) -> Path:
    """Return the report of a rank that reports for its machine: rank 8's is "a.rank8.json"."""
    return report.with_name(f"{report.stem}.rank{rank}{report.suffix}") if rank else report


def attachment_of_optimizer(optimizer: Any) -> Attachment | None:
    """Return the attachment of a ZeRO optimizer; None if it is not ours."""
    found = getattr(optimizer, "attachment", None)
    return found if isinstance(found, Attachment) else None


def attachment_of(engine: Any) -> Attachment | None:
    """Return the attachment of a DeepSpeed engine; None if its model has none."""
    found = attachment_of_optimizer(getattr(engine, "optimizer", None))
    if found is not None:
        return found
    for param in engine.module.parameters():
        found = getattr(getattr(param, "nvme_swapper", None), "memascend_attachment", None)
        if isinstance(found, Attachment):
            return found
    return None


#: Added to DeepSpeed's engine class as `engine.memascend`.
ENGINE_PROPERTY = property(
    attachment_of, doc="memascend's attachment of this engine, None without a block."
)


def _device_bytes_peak() -> int | None:
    accelerator = get_accelerator()
    if accelerator.is_synchronized_device():  # the CPU: its memory is host memory
        return None
    return int(accelerator.max_memory_allocated())


def _status_file(attachment: weakref.ref[Attachment], place: RankPlace) -> StatusFile:
    """Return the status file of an attachment; it does not keep the attachment alive."""

    def living() -> Attachment:
        found = attachment()
        if found is None:
            raise ReferenceError("the model is gone")
        return found

    return StatusFile(
        place,
        read_ledger=lambda: living().ledger(),
        read_drive=lambda: living().runtime.drive.stats(),
    )


def _finish(attachment: weakref.ref[Attachment], process: int) -> None:
    found = attachment()
    # Not in a forked child, which has neither store nor memory.
    if found is not None and os.getpid() == process:
        # Python sets sys.last_type when it prints an uncaught exception.
        found.finish(is_well=getattr(sys, "last_type", None) is None)
