"""Runtime: creates, connects and owns memory, store, pool and kernels.

One runtime serves one model: its parameters and its optimizer share it. There are no singletons;
two models in a process have two independent runtimes. Knows torch, never DeepSpeed: the caller
passes the stock replacements for sections that are off.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from memascend import _core
from memascend.base.components import (
    ACTIVATION_SLOTS,
    PARAMETER_SLOTS,
    STAGING_SLOTS,
    WAITING_GRADIENTS,
)
from memascend.base.interfaces import Device, HostMemory, TensorIO
from memascend.base.sizes import STAGING_SLOT_BYTES, STAGING_SLOT_COUNT
from memascend.base.units import MIB, format_nbytes, page_up
from memascend.base.waiting import EventPool
from memascend.config.block import MemAscendConfig
from memascend.kernels.overflow import KernelHelpers, scan, sum_of_squares
from memascend.ledger.guesses import Guesses
from memascend.ledger.ledger import DeviceRow, Ledger, LedgerRow
from memascend.ledger.wear import Wear
from memascend.memory.allocator import HostAllocator
from memascend.memory.guard import Guard
from memascend.memory.pool import Pool
from memascend.nvme.resident import ResidentStore
from memascend.plan.derive import Plan
from memascend.resources.drive import Drive, OwnDrive, StockDrive
from memascend.resources.host import Host, OwnHost, StockHost
from memascend.streaming.activations.stream import ActivationStream
from memascend.streaming.background import BackgroundStep
from memascend.streaming.gradients.on_device import GradientsOnDevice
from memascend.streaming.gradients.stream import GradientStream
from memascend.streaming.hand_over import HandOver
from memascend.streaming.optimizer.stream import OptimizerStream
from memascend.streaming.optimizer.sub_groups import SubGroups
from memascend.streaming.optimizer.tile_memory import TileMemory, TileShape
from memascend.streaming.parameters.stream import ParameterStream
from memascend.system.memory import resident_memory
from memascend.transfer.staging import StagingSlots

#: Host memory budget of streamed parameters until there is a plan.
PARAMETER_BUDGET_BYTES = 512 * MIB


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
        device = device or Device()
        self.new_event = None if device.new_event is None else EventPool(device.new_event)
        self.device = replace(device, new_event=self.new_event)
        self.background = BackgroundStep(self._prepare_step)  # the optimizer's, in the background
        self.hand_over = HandOver()  # of its values to parameters that wait for them
        self.guesses: Guesses | None = None  # counted by the optimizer
        self.lock = threading.RLock()  # for the data paths: backward has a thread for each device
        self._guard = Guard(self.lock)
        self.on_device = GradientsOnDevice(self.device, self._guard)
        self.helpers = KernelHelpers()  # for checks of gradients; joined with this object
        self.host: Host = (
            OwnHost(config, directory, page_lock=page_lock, device=device, limit_bytes=limit_bytes)
            if config.allocator.enabled
            else StockHost(stock.memory)
        )
        self.drive: Drive = (
            OwnDrive(config, directory, self.host)
            if config.direct_nvme.enabled
            else StockDrive(stock.store)
        )
        self._staging: StagingSlots | None = None
        self._parameters: ParameterStream | None = None
        self._activations: ActivationStream | None = None
        self._gradients: GradientStream | None = None
        self._optimizer: OptimizerStream | None = None
        self._slot_count = STAGING_SLOT_COUNT
        self._slot_bytes = staging_slot_bytes or STAGING_SLOT_BYTES
        self.pool = _make_pool(
            config, stock.slot_memory or self.memory, parameter_budget_bytes, self._guard
        )
        self.overflow_check = _make_overflow_check(config, self.helpers)

    def _prepare_step(self) -> None:
        """Make the device current on the optimizer's thread; exclude its waits from the account."""
        self.device.use_here()
        _core.wait_behind()

    @property
    def memory(self) -> HostMemory:
        """The source of host tensors."""
        return self.host.memory

    @property
    def arena(self) -> HostAllocator | None:
        """The arena; None if the allocator is off. `host` answers in both cases."""
        return self.host.arena

    @property
    def io(self) -> TensorIO:
        """The store; if direct_nvme is off, DeepSpeed's engine, which moves whole keys."""
        return self.drive.io

    @property
    def store(self) -> ResidentStore | None:
        """The store; None if direct_nvme is off. `drive` answers in both cases."""
        return self.drive.store

    @property
    def staging(self) -> StagingSlots:
        """The staging slots, shared by all data paths except activations."""
        if self._staging is None:
            self._staging = self._new_slots(STAGING_SLOTS, self._guard)
        return self._staging

    @property
    def parameters(self) -> ParameterStream:
        """The stream of parameters; without a budget each shard has a slot, and none is lent."""
        if self._parameters is None:
            is_bounded = self.pool.is_bounded
            self._parameters = ParameterStream(
                store=self.io,
                pool=self.pool,
                prefetch_bytes=self.config.buffer_pool.prefetch_bytes,
                drive_count=1 if self.plan is None else self.plan.drive_count,
                staging=self.staging if is_bounded else None,
                device=torch.device(self.device.name),
                background=self.background,
                hand_over=self.hand_over,
                lender=self.store if is_bounded else None,
            )
        return self._parameters

    @property
    def activations(self) -> ActivationStream:
        """The stream of saved activations, with its own staging slots."""
        if self._activations is None:
            self._activations = ActivationStream(
                slots=self._new_slots(ACTIVATION_SLOTS, None),  # the stream's thread uses them
                device_bytes=self.config.activations.device_bytes,
                device=self.device,
            )
        return self._activations

    @property
    def gradients(self) -> GradientStream:
        """The stream of gradients, after `open_gradients`."""
        if self._gradients is None:
            raise AssertionError("the stream of gradients is not open")
        return self._gradients

    @property
    def optimizer(self) -> OptimizerStream:
        """The stream of master weights and optimizer states, after `open_optimizer`."""
        if self._optimizer is None:
            raise AssertionError("the stream of the optimizer is not open")
        return self._optimizer

    def open_gradients(self, norm_dtype: torch.dtype | None) -> GradientStream:
        """Build the stream of gradients.

        Args:
            norm_dtype: Dtype of sums of squares; None if no norms are needed.
        """
        assert self.store is not None
        squares = functools.partial(
            sum_of_squares,
            fused=self.config.overflow_check.enabled,
            helpers=self.helpers,
            dtype=norm_dtype,
        )
        self._gradients = GradientStream(
            store=self.io,
            slots=self.staging,
            sum_of_squares=None if norm_dtype is None else squares,
            give_memory_to=self.store.give_memory_to,
            memory_of=self.store.memory_of,
        )
        return self._gradients

    def open_optimizer(self, shape: TileShape) -> OptimizerStream:
        """Build the stream of the optimizer over that of gradients, with memory for its tiles."""
        tiles = TileMemory(
            store=self.io,
            memory=self.memory,
            shape=shape,
            new_event=self.new_event,
            wait_idle=self.device.wait_idle,
        )
        self._optimizer = OptimizerStream(
            groups=SubGroups(store=self.io, slots=self.staging, tiles=tiles),
            tiles=tiles,
            gradient_stream=self.gradients,
            take_over=None if self.store is None else self.store.take_over,
            hand_over=self.hand_over,
        )
        return self._optimizer

    def close_optimizer(self) -> None:
        """Drop gradients and tiles, and give their memory and drive space back.

        Master weights and states are discarded before, by their owner.
        """
        gradients, self._gradients, self._optimizer = self._gradients, None, None
        if gradients is not None:
            with self.lock:
                gradients.discard()
        if self.store is not None:
            self.store.trim()
        self.host.trim()

    def _new_slots(self, component: str, guard: Guard | None) -> StagingSlots:
        return StagingSlots(
            store=self.io,
            memory=self.memory,
            slot_bytes=self._slot_bytes,
            slot_count=self._slot_count,
            component=component,
            new_event=self.new_event,
            wait_idle=self.device.wait_idle,
            guard=guard,
        )

    def _resize_slots(self, slot_bytes: int, slot_count: int) -> None:
        self._slot_bytes, self._slot_count = slot_bytes, slot_count
        if self._staging is not None:
            with self.lock:
                self._staging.resize(slot_bytes=slot_bytes, slot_count=slot_count)
        if self._activations is not None:
            self._activations.drain()
            self._activations.slots.resize(slot_bytes=slot_bytes, slot_count=slot_count)

    def _resize_pool(self, budget_bytes: int, *, slot_bytes_max: int) -> None:
        if self.pool.is_bounded:
            with self.lock:
                self.pool.resize(budget_bytes, slot_bytes_max=slot_bytes_max)

    @property
    def unregistered_bytes(self) -> int:
        """Bytes of the arena that could not be registered with the device: copies of them block."""
        return self.host.unregistered_bytes

    def adopt(self, plan: Plan) -> None:
        """Replace the provisional slots and grants by those of the plan, all at once.

        The optimizer's attachment allocates the tiles afterwards.

        Raises:
            ValueError: A slot is in use.
            HostMemoryError: There is not enough memory.
            StoreError: The drive failed.
        """
        resident = _pages(plan.resident)
        self.drive.make_way(resident)
        self._resize_pool(0, slot_bytes_max=0)
        self._resize_slots(plan.staging_slot_bytes, 0)
        # Registered memory is freed in whole pieces only: trim before new blocks occupy them.
        self.host.trim()
        self.drive.provide_checksums(plan.checksum_bytes)
        self._resize_slots(plan.staging_slot_bytes, plan.staging_slot_count)
        _ = self.staging  # allocates the slots if there were none
        if self.config.activations.enabled:
            _ = self.activations
        self._resize_pool(plan.parameter_slots_bytes, slot_bytes_max=plan.slot_bytes_max)
        if self._parameters is not None:
            self._parameters.note_drives(plan.drive_count)
        self.drive.grant(resident)
        self.on_device.room_bytes = plan.gradient_room_bytes
        self.plan = plan

    def ledger(self) -> Ledger:
        """Return memascend's host memory by component, planned and measured."""
        planned = dict(self.plan.host) if self.plan is not None else {}
        measured = self.host.components()
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
        held_bytes, held_bytes_peak = self.host.held_bytes()
        resident_bytes, resident_bytes_peak = resident_memory()
        return Ledger(
            rows=sorted(rows, key=lambda row: -max(row.planned_bytes or 0, row.peak_bytes)),
            limit_bytes=self.limit_bytes,
            held_bytes=held_bytes,
            held_bytes_peak=held_bytes_peak,
            unregistered_bytes=self.unregistered_bytes,
            resident_bytes=resident_bytes,
            resident_bytes_peak=resident_bytes_peak,
            drive=self.drive.stats(),
            wear=self.read_wear(),
            volumes=self.drive.volumes(),
            activations=None if self._activations is None else replace(self._activations.traffic),
            gradients_on_device=self._gradients_on_device(),
            guesses=None if self.guesses is None else replace(self.guesses),
        )

    def _gradients_on_device(self) -> DeviceRow | None:
        if self.plan is None or not self.on_device.has_streams:
            return None
        return DeviceRow(
            component=WAITING_GRADIENTS,
            planned_bytes=self.plan.gradient_room_bytes,
            live_bytes=self.on_device.held_bytes,
            peak_bytes=self.on_device.bytes_peak,
        )

    def note_checkpoint(self, folder: str) -> None:
        """Note the checkpoint that an error about corrupted data recommends.

        Args:
            folder: Folder of the last complete checkpoint.
        """
        self.drive.note_checkpoint(folder)

    def read_wear(self) -> Wear | None:
        """Return the account of writes to the drives so far; None without a store."""
        return self.drive.read_wear()

    def note_step(self) -> Wear | None:
        """Count an optimizer step; return the account, once, when the write budget is exceeded."""
        return self.drive.note_step()

    def describe(self) -> str:
        """Return one line for the log: the engine and memory that were actually obtained."""
        parts = [self.drive.describe(), self.host.describe()]
        if self.pool.is_bounded:
            budget = format_nbytes(self.pool.budget_bytes)
            parts.append(f"parameters within {budget} of host memory")
        return "; ".join(parts)

    def close(self) -> None:
        """Wait for transfers and free the drive's space; memory is freed with its last view."""
        self.on_device.close()
        if self._activations is not None:
            self._activations.close()
        self.drive.close()


def _pages(resident: Mapping[str, int]) -> dict[str, int]:
    return {stream: page_up(nbytes) for stream, nbytes in resident.items() if nbytes}


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
