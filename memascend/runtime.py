"""Runtime: the one place where memory, store, pool and kernels are wired together and owned.

One runtime serves one model: its parameters and its optimizer share it. Nothing here is a
singleton; two models in a process have two runtimes that know nothing of each other. Knows torch,
never DeepSpeed: what stands in for a section that is switched off is given by the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from memascend.allocator import HostAllocator, describe
from memascend.config import MemAscendConfig
from memascend.numa import preferred_node
from memascend.nvme import TensorStore
from memascend.overflow import scan
from memascend.pool import ArenaSlots, ParameterPool
from memascend.tensors import HostMemory, RangeIO, SlotPool, TensorIO

#: Bytes through which unaligned heads and tails of transfers pass.
BOUNCE_BYTES = 4 << 20


@dataclass(frozen=True)
class Substitutes:
    """What serves instead of a section that is off."""

    memory: HostMemory | None = None  # instead of the allocator
    store: TensorIO | None = None  # instead of direct_nvme
    pool: SlotPool | None = None  # where slots cannot come from an arena


class Runtime:
    """Built once per model from the `memascend` block."""

    def __init__(
        self,
        *,
        config: MemAscendConfig,
        directory: str,
        page_lock: bool,
        register_device: bool,
        pci_address: str | None,
        substitutes: Substitutes,
    ) -> None:
        self.config = config
        self.directory = directory
        self.arena: HostAllocator | None = None
        self.store: TensorStore | None = None
        if config.allocator.enabled:
            self.arena = _make_arena(config, directory, page_lock, register_device, pci_address)
        memory = self.arena or substitutes.memory
        if memory is None:
            raise AssertionError("the allocator is off and nothing was given instead")
        self.memory: HostMemory = memory
        if config.direct_nvme.enabled:
            self.store = _make_store(config, directory, memory)
        self._io = self.store or substitutes.store
        self._pool = substitutes.pool or _make_pool(self.arena)
        self.overflow_check = _make_overflow_check(config)

    @property
    def io(self) -> TensorIO:
        """What reads and writes parameters."""
        if self._io is None:
            raise AssertionError("direct_nvme is off and nothing was given instead")
        return self._io

    @property
    def ranges(self) -> RangeIO:
        """What reads and writes parts of keys."""
        if self.store is None:
            raise AssertionError("direct_nvme is off, and nothing else works on parts of keys")
        return self.store

    @property
    def pool(self) -> SlotPool:
        """Where parameters are staged."""
        if self._pool is None:
            raise AssertionError("the allocator is off and no pool was given instead")
        return self._pool

    def describe(self) -> str:
        """One line for the log: what was really obtained."""
        parts = []
        if self.store is not None:
            parts.append(
                f"engine {self.store.core.engine_name} ({self.store.core.engine_description})"
            )
        else:
            parts.append("engine DeepSpeed aio")
        if self.arena is not None:
            parts.append(f"arena {describe(self.arena.core.report())}")
        else:
            parts.append("pinned memory of the accelerator")
        return "; ".join(parts)

    def close(self) -> None:
        """Waits for transfers and gives the drive's space back; memory follows its last view."""
        if self.store is not None:
            self.store.close()


def _make_pool(arena: HostAllocator | None) -> SlotPool | None:
    if arena is None:
        return None
    return ArenaSlots(ParameterPool(allocator=arena, component="parameter pool"))


def _make_arena(
    config: MemAscendConfig,
    directory: str,
    page_lock: bool,
    register_device: bool,
    pci_address: str | None,
) -> HostAllocator:
    section = config.allocator
    return HostAllocator(
        huge_pages=section.huge_pages or "auto",
        lock=page_lock if section.page_lock is None else section.page_lock,
        register_device=register_device,
        numa_node=preferred_node([directory], pci_address=pci_address),
        prefault_threads=section.prefault_threads,
    )


def _make_store(config: MemAscendConfig, directory: str, memory: HostMemory) -> TensorStore:
    section = config.direct_nvme
    bounce = memory.tensor(BOUNCE_BYTES, torch.uint8, component="bounce buffers")
    return TensorStore(
        directories=[directory],
        bounce=bounce,
        engine=section.engine or "auto",
        queue_depth=section.queue_depth,
        chunk_bytes=section.chunk_bytes,
        threads=section.threads,
        sqpoll=section.sqpoll,
        iopoll=section.iopoll,
    )


def _make_overflow_check(config: MemAscendConfig) -> Callable[[torch.Tensor], bool] | None:
    section = config.overflow_check
    if not section.enabled:
        return None

    def has_non_finite(gradients: torch.Tensor) -> bool:
        return scan(gradients, threads=section.threads).non_finite

    return has_non_finite
