"""Host memory of a runtime: our arena, or pinned memory of stock DeepSpeed. Both answer the same.

Knows torch tensors only through HostMemory; never DeepSpeed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from memascend import _core
from memascend.base.interfaces import Device, HostMemory
from memascend.base.units import format_nbytes
from memascend.config.block import MemAscendConfig
from memascend.memory.allocator import HostAllocator, describe
from memascend.system.numa import preferred_node
from memascend.volumes.prepare import volume_paths

log = logging.getLogger(__name__)


class OwnHost:
    """The arena: the section `allocator` is on."""

    is_ours = True

    def __init__(
        self,
        config: MemAscendConfig,
        directory: str,
        *,
        page_lock: bool,
        device: Device,
        limit_bytes: int | None,
    ) -> None:
        """Reserve addresses, without memory.

        Args:
            config: The block.
            directory: A directory on the drive, for a block without `volumes`.
            page_lock: Whether memory is locked if the block does not state it.
            device: The rank's accelerator.
            limit_bytes: Maximum of memory to hold; None: no limit.
        """
        section = config.allocator
        self.arena = HostAllocator(
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
        self.checksum_memory: _core.Allocator | None = self.arena.core

    @property
    def memory(self) -> HostMemory:
        """The source of host tensors."""
        return self.arena

    @property
    def unregistered_bytes(self) -> int:
        """Bytes that could not be registered with the device: copies of them block."""
        return self.arena.unregistered_bytes

    def trim(self) -> None:
        """Give memory that no block uses back to the system."""
        self.arena.core.trim()

    def reduced(self, resident: Mapping[str, int]) -> dict[str, int]:
        """Return resident bytes by stream, reduced by holes that the arena cannot free.

        Holes are in registered pieces that are partly in use, and in explicit huge pages.
        """
        self.trim()
        stats = self.arena.core.stats()
        lost_bytes, left = stats.reserved_bytes - stats.used_bytes, dict(resident)
        if lost_bytes and left:
            log.info("memascend: the arena cannot give %s back", format_nbytes(lost_bytes))
        for stream in reversed(left):
            cut_bytes = min(lost_bytes, left[stream])
            left[stream] -= cut_bytes
            lost_bytes -= cut_bytes
        return left

    def components(self) -> dict[str, _core.ComponentStats]:
        """Return live and peak bytes by component."""
        return self.arena.core.components()

    def held_bytes(self) -> tuple[int, int]:
        """Return the bytes held now, and their peak."""
        stats = self.arena.core.stats()
        return stats.reserved_bytes, stats.peak_reserved_bytes

    def describe(self) -> str:
        """Return the memory that was obtained, for the log."""
        return f"arena {describe(self.arena.core.report())}"


class StockHost:
    """Memory of stock DeepSpeed, of which there is no account: the section `allocator` is off."""

    is_ours = False
    arena: HostAllocator | None = None
    checksum_memory: _core.Allocator | None = None
    unregistered_bytes = 0

    def __init__(self, memory: HostMemory | None) -> None:
        """Serve from `memory`.

        Raises:
            AssertionError: `memory` is None.
        """
        if memory is None:
            raise AssertionError("the allocator is off and nothing was given instead")
        self.memory = memory

    def trim(self) -> None:
        """Do nothing: torch keeps free memory."""

    def reduced(self, resident: Mapping[str, int]) -> dict[str, int]:
        """Return the resident bytes unchanged."""
        return dict(resident)

    def components(self) -> dict[str, _core.ComponentStats]:
        """Return nothing."""
        return {}

    def held_bytes(self) -> tuple[int, int]:
        """Return zeros."""
        return 0, 0

    def describe(self) -> str:
        """Return the kind of memory, for the log."""
        return "pinned memory of the accelerator"


Host = OwnHost | StockHost
