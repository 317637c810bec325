"""Runtime: creates, connects and owns memory, store, pool and kernels.

One runtime serves one model: its parameters and its optimizer share it. There are no singletons;
two models in a process have two independent runtimes. Knows torch, never DeepSpeed: the caller
passes the stock replacements for sections that are off.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from memascend import _core
from memascend.base.components import (
    ACTIVATION_SLOTS,
    BOUNCE_BUFFERS,
    PARAMETER_SLOTS,
    RESIDENT_CACHE,
    STAGING_SLOTS,
)
from memascend.base.interfaces import Device, HostMemory, TensorIO
from memascend.base.sizes import BOUNCE_BYTES, STAGING_SLOT_BYTES, STAGING_SLOT_COUNT
from memascend.base.streams import GRADIENTS, MASTER, PARAMETERS, STATE
from memascend.base.units import MIB, format_nbytes, page_up
from memascend.base.waiting import EventPool
from memascend.config.block import MemAscendConfig
from memascend.config.environment import local_world_size
from memascend.kernels.overflow import KernelHelpers, scan
from memascend.ledger.ledger import Ledger, LedgerRow
from memascend.ledger.traffic import traffic_of
from memascend.ledger.wear import Wear, WearMeter
from memascend.memory.allocator import HostAllocator, describe
from memascend.memory.guard import Guard
from memascend.memory.pool import Pool
from memascend.nvme.resident import ResidentStore
from memascend.nvme.store import TensorStore, describe_recovery
from memascend.plan.derive import Plan
from memascend.streaming.activations.stream import ActivationStream
from memascend.streaming.background import BackgroundStep
from memascend.system.memory import resident_memory
from memascend.system.numa import preferred_node
from memascend.transfer.staging import StagingSlots
from memascend.volumes.prepare import prepared, volume_paths

log = logging.getLogger(__name__)

#: Host memory budget of streamed parameters until there is a plan.
PARAMETER_BUDGET_BYTES = 512 * MIB

#: The stream of a key, by its prefix before the first dot.
STREAM_OF_PREFIX = {
    "param": PARAMETERS,
    "gradient": GRADIENTS,
    "master": MASTER,
    "state": STATE,
}


def stream_of(key: str) -> str | None:
    """Return the stream that a key of the store belongs to; None if no plan counts it."""
    return STREAM_OF_PREFIX.get(key.partition(".")[0])


@dataclass(frozen=True)
class StockParts:
    """Parts of stock DeepSpeed that replace sections that are off."""

    memory: HostMemory | None = None  # instead of the allocator
    store: TensorIO | None = None  # instead of direct_nvme
    slot_memory: HostMemory | None = None  # for the pool, if that store needs its own memory


def streams_parameters(config: MemAscendConfig) -> bool:
    """Return whether streaming.parameters and the sections it requires are on."""
    needed = (config.buffer_pool, config.direct_nvme, config.streaming.parameters)
    return all(section.enabled for section in needed)


class Runtime:
    """Built once per model from the `memascend` block."""

    plan: Plan | None = None

    def __init__(
        self,
        *,
        config: MemAscendConfig,
        directory: str,
        page_lock: bool,
        stock: StockParts,
        device: Device | None = None,
        parameter_budget_bytes: int | None = None,
        staging_slot_bytes: int | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        """Open the store and create the parts that every training needs; slots follow on demand.

        Args:
            config: The validated block.
            directory: A directory on the drive, for a block without `volumes`.
            page_lock: Whether host memory is locked if the block does not state it.
            stock: Replacements for the sections that are off.
            device: The rank's accelerator; None for the CPU.
            parameter_budget_bytes: Host memory budget of streamed parameters; must be the same on
                every rank. None: PARAMETER_BUDGET_BYTES.
            staging_slot_bytes: Bytes of a staging slot; None: STAGING_SLOT_BYTES.
            limit_bytes: Limit of the host memory of all components together; None: no limit.
        """
        self.config, self.directory, self.limit_bytes = config, directory, limit_bytes
        self._device = device = device or Device()
        self.new_event = None if device.new_event is None else EventPool(device.new_event)
        self.background = BackgroundStep(self._prepare_step)  # the optimizer's, in the background
        self.lock = threading.RLock()  # for the data paths: backward has a thread for each device
        self._guard = Guard(self.lock)
        self.helpers = KernelHelpers()  # for checks of gradients; joined with this object
        self.arena: HostAllocator | None = None
        if config.allocator.enabled:
            self.arena = _make_arena(
                config,
                directory,
                page_lock,
                device=self._device,
                limit_bytes=limit_bytes,
            )
        memory = self.arena or stock.memory
        if memory is None:
            raise AssertionError("the allocator is off and nothing was given instead")
        self.memory: HostMemory = memory
        has_store = config.direct_nvme.enabled
        self.store = _make_store(config, directory, memory, self.arena) if has_store else None
        self._io = self.store or stock.store
        self._staging: StagingSlots | None = None
        self._activations: ActivationStream | None = None
        self._slot_count = STAGING_SLOT_COUNT
        self._slot_bytes = staging_slot_bytes or STAGING_SLOT_BYTES
        self.pool = _make_pool(
            config, stock.slot_memory or memory, parameter_budget_bytes, self._guard
        )
        self.overflow_check = _make_overflow_check(config, self.helpers)
        self.wear = _make_wear_meter(config)

    def _prepare_step(self) -> None:
        """Make the device current on the optimizer's thread; exclude its waits from the account."""
        self._device.use_here()
        _core.wait_behind()

    @property
    def io(self) -> TensorIO:
        """The store; if direct_nvme is off, DeepSpeed's engine, which moves whole keys."""
        if self._io is None:
            raise AssertionError("direct_nvme is off and nothing was given instead")
        return self._io

    @property
    def staging(self) -> StagingSlots:
        """The staging slots, shared by all data paths except activations."""
        if self._staging is None:
            self._staging = self._new_slots(STAGING_SLOTS, self._guard)
        return self._staging

    @property
    def activations(self) -> ActivationStream:
        """The stream of saved activations, with its own staging slots."""
        if self._activations is None:
            new_stream = self._device.new_stream
            self._activations = ActivationStream(
                slots=self._new_slots(ACTIVATION_SLOTS, None),  # the stream's thread uses them
                device_bytes=self.config.activations.device_bytes,
                new_event=self.new_event,
                on_copy_stream=nullcontext if new_stream is None else new_stream(),
                use_device=self._device.use_here,
            )
        return self._activations

    def _new_slots(self, component: str, guard: Guard | None) -> StagingSlots:
        return StagingSlots(
            store=self.io,
            memory=self.memory,
            slot_bytes=self._slot_bytes,
            slot_count=self._slot_count,
            component=component,
            new_event=self.new_event,
            wait_idle=self._device.wait_idle,
            guard=guard,
        )

    def _exchange_slots(self, slot_bytes: int, slot_count: int) -> None:
        self._slot_bytes, self._slot_count = slot_bytes, slot_count
        if self._staging is not None:
            with self.lock:
                self._staging.resize(slot_bytes=slot_bytes, slot_count=slot_count)
        if self._activations is not None:
            self._activations.settle()
            self._activations.slots.resize(slot_bytes=slot_bytes, slot_count=slot_count)

    def _resize_pool(self, budget_bytes: int, *, slot_bytes_max: int) -> None:
        if self.pool.is_bounded:
            with self.lock:
                self.pool.resize(budget_bytes, slot_bytes_max=slot_bytes_max)

    @property
    def unregistered_bytes(self) -> int:
        """Bytes of the arena that could not be registered with the device: copies of them block."""
        return self.arena.unregistered_bytes if self.arena is not None else 0

    def adopt(self, plan: Plan) -> None:
        """Replace the provisional slots and grants by those of the plan, all at once.

        The optimizer's attachment allocates the tiles afterwards.

        Raises:
            ValueError: A slot is in use.
            HostMemoryError: There is not enough memory.
            StoreError: The drive failed.
        """
        resident = _pages(plan.resident)
        if self.store is not None and self.store.granted != resident:
            self.store.revoke()
        self._resize_pool(0, slot_bytes_max=0)
        self._exchange_slots(plan.staging_slot_bytes, 0)
        if self.arena is not None:
            # Registered memory is freed in whole pieces only: trim before new blocks occupy them.
            self.arena.core.trim()
        if self.store is not None:
            self.store.core.provide_checksums(nbytes=plan.checksum_bytes)
        self._exchange_slots(plan.staging_slot_bytes, plan.staging_slot_count)
        _ = self.staging  # allocates the slots if there were none
        if self.config.activations.enabled:
            _ = self.activations
        self._resize_pool(plan.parameter_slots_bytes, slot_bytes_max=plan.slot_bytes_max)
        if self.store is not None and self.store.granted != resident:
            self.store.grant(
                self._within_arena(resident), memory=self.memory, component=RESIDENT_CACHE
            )
        self.plan = plan

    def _within_arena(self, resident: dict[str, int]) -> dict[str, int]:
        """Return the resident bytes, reduced by holes that the arena cannot free.

        The tiles are allocated after this. Holes are in registered pieces that are partly in use,
        and in explicit huge pages.
        """
        if self.arena is None:
            return resident
        self.arena.core.trim()
        stats = self.arena.core.stats()
        lost_bytes = stats.reserved_bytes - stats.used_bytes
        if lost_bytes and resident:
            log.info("memascend: the arena cannot give %s back", format_nbytes(lost_bytes))
        for stream in reversed(resident):
            cut_bytes = min(lost_bytes, resident[stream])
            resident[stream] -= cut_bytes
            lost_bytes -= cut_bytes
        return resident

    def ledger(self) -> Ledger:
        """Return memascend's host memory by component, planned and measured."""
        planned = dict(self.plan.host) if self.plan is not None else {}
        measured = self.arena.core.components() if self.arena is not None else {}
        rows = [
            LedgerRow(
                component=name,
                planned_bytes=planned.get(name, 0) if planned else None,
                live_bytes=measured[name].live_bytes if name in measured else 0,
                peak_bytes=measured[name].peak_bytes if name in measured else 0,
            )
            for name in planned | measured
            if planned.get(name) or name in measured
        ]
        stats = self.arena.core.stats() if self.arena is not None else None
        resident_bytes, resident_bytes_peak = resident_memory()
        return Ledger(
            rows=sorted(rows, key=lambda row: -max(row.planned_bytes or 0, row.peak_bytes)),
            limit_bytes=self.limit_bytes,
            held_bytes=stats.reserved_bytes if stats else 0,
            held_bytes_peak=stats.peak_reserved_bytes if stats else 0,
            unregistered_bytes=self.unregistered_bytes,
            resident_bytes=resident_bytes,
            resident_bytes_peak=resident_bytes_peak,
            drive=self.store.stats() if self.store is not None else {},
            wear=self.read_wear(),
            volumes=traffic_of(self.store.core) if self.store is not None else (),
            activations=None if self._activations is None else replace(self._activations.traffic),
        )

    def note_checkpoint(self, folder: str) -> None:
        """Note the checkpoint that an error about corrupted data recommends.

        Args:
            folder: Folder of the last complete checkpoint.
        """
        if self.store is not None:
            self.store.core.set_recovery(describe_recovery(folder))

    def read_wear(self) -> Wear | None:
        """Return the account of writes to the drives so far; None without a store."""
        return self.wear.read(self._written_bytes) if self.store is not None else None

    def note_step(self) -> Wear | None:
        """Count an optimizer step; return the account, once, when the write budget is exceeded."""
        return self.wear.note_step(self._written_bytes) if self.store is not None else None

    @property
    def _written_bytes(self) -> int:
        return 0 if self.store is None else int(self.store.stats()["bytes_written"])

    def describe(self) -> str:
        """Return one line for the log: the engine and memory that were actually obtained."""
        parts = ["engine DeepSpeed aio", "pinned memory of the accelerator"]
        if self.store is not None:
            core = self.store.core
            parts[0] = f"engine {core.engine_name} ({core.engine_description})"
        if self.arena is not None:
            parts[1] = f"arena {describe(self.arena.core.report())}"
        if self.pool.is_bounded:
            budget = format_nbytes(self.pool.budget_bytes)
            parts.append(f"parameters within {budget} of host memory")
        return "; ".join(parts)

    def close(self) -> None:
        """Wait for transfers and free the drive's space; memory is freed with its last view."""
        if self._activations is not None:
            self._activations.close()
        if self.store is not None:
            self.store.close()


def _pages(resident: Mapping[str, int]) -> dict[str, int]:
    return {stream: page_up(nbytes) for stream, nbytes in resident.items() if nbytes}


def _make_arena(
    config: MemAscendConfig,
    directory: str,
    page_lock: bool,
    *,
    device: Device,
    limit_bytes: int | None,
) -> HostAllocator:
    section = config.allocator
    return HostAllocator(
        huge_pages=section.huge_pages or "auto",
        lock=page_lock if section.page_lock is None else section.page_lock,
        register_device=device.registers and page_lock,
        registrar=device.registrar,
        numa_node=preferred_node(
            [path for path in volume_paths(config, directory) if os.path.exists(path)],
            pci_address=device.pci_address,
        ),
        limit_bytes=limit_bytes or 0,
    )


def _make_store(
    config: MemAscendConfig, directory: str, memory: HostMemory, arena: HostAllocator | None
) -> ResidentStore:
    section = config.direct_nvme
    bounce = memory.tensor(BOUNCE_BYTES, torch.uint8, component=BOUNCE_BUFFERS)
    with prepared(config, directory) as volumes:
        store = TensorStore(
            volumes=volumes,
            bounce=bounce,
            engine=section.engine or "auto",
            queue_depth=section.queue_depth,
            chunk_bytes=section.chunk_bytes,
            eio_retries=section.eio_retries,
            verify=config.verify,
            checksum_memory=arena.core if arena is not None else None,
        )
    store.core.set_recovery(describe_recovery(None))
    return ResidentStore(store, stream_of=stream_of)


def _make_pool(
    config: MemAscendConfig, memory: HostMemory, budget_bytes: int | None, guard: Guard
) -> Pool:
    is_bounded = streams_parameters(config)
    return Pool(
        memory=memory,
        component=PARAMETER_SLOTS,
        budget_bytes=(budget_bytes or PARAMETER_BUDGET_BYTES) if is_bounded else None,
        guard=guard,
    )


def _make_overflow_check(
    config: MemAscendConfig, helpers: KernelHelpers
) -> Callable[[torch.Tensor], bool] | None:
    if not config.overflow_check.enabled:
        return None
    return lambda gradients: scan(gradients, helpers=helpers).non_finite


def _make_wear_meter(config: MemAscendConfig) -> WearMeter:
    return WearMeter(
        endurance_bytes=config.wear.endurance,
        budget_bytes=config.wear.write_budget,
        ranks=local_world_size(),
    )
