"""Host memory for tensors: a typed wrapper of the native allocator, and its log lines.

Imports torch only to make a tensor. Knows the use of memory only as a component name. Thread-safe
as the native allocator is; in a race a warning may be logged twice.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal

from memascend._core import Allocator, ArenaReport
from memascend.base.interfaces import HostMemory, Registrar
from memascend.base.units import format_nbytes

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger(__name__)

HugePages = Literal["auto", "explicit", "transparent", "off"]


class HostAllocator(HostMemory):
    """Tensors in huge-page backed, page-locked host memory, without power-of-two rounding.

    A tensor owns its block: the memory is freed with the last tensor that shares it. If the system
    refuses huge pages, page lock or device registration, allocation continues without it, and one
    WARNING for each has the remedy.
    """

    def __init__(
        self,
        *,
        huge_pages: HugePages = "auto",
        lock: bool = True,
        register_device: bool = False,
        registrar: Registrar | None = None,
        numa_node: int | None = None,
        limit_bytes: int = 0,
    ) -> None:
        """Reserve addresses, without memory.

        Args:
            huge_pages: Kind of huge pages; "auto" takes explicit ones if enough are free, else
                transparent ones.
            lock: Page-lock the memory, so that it is not swapped out.
            register_device: Register with the device, so that copies do not block. A refused
                registration is retried whenever more memory is taken.
            registrar: Object that registers the memory; None: CUDA's driver.
            numa_node: Node of the memory; None leaves it to the kernel.
            limit_bytes: Maximum of memory to hold; 0 for no limit.
        """
        self.core = Allocator(
            huge_pages=huge_pages,
            lock=lock,
            register_device=register_device,
            registrar=registrar,
            numa_node=-1 if numa_node is None else numa_node,
            limit_bytes=limit_bytes,
        )
        self._wants_registration = register_device
        self._logged_notes: set[str] = set()
        self._described = False
        self._log_new_notes()

    def allocate(self, nbytes: int, *, component: str, zero: bool) -> torch.Tensor:
        """Return a block of its own; its contents are arbitrary unless `zero`."""
        import torch

        block = self.core.allocate(nbytes=nbytes, component=component, zero=zero)
        self._log_new_notes()
        if not self._described:
            self._described = True
            _LOG.info("host memory: %s", describe(self.core.report()))
        return torch.frombuffer(block, dtype=torch.uint8)

    @property
    def unregistered_bytes(self) -> int:
        """Bytes that should be registered with the device and are not."""
        if not self._wants_registration:
            return 0
        stats = self.core.stats()
        return stats.reserved_bytes - stats.registered_bytes

    def contains(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's first element lies in a live block of ours."""
        return self.core.contains(tensor.data_ptr())

    def _log_new_notes(self) -> None:
        for note in self.core.notes():
            if note not in self._logged_notes:
                self._logged_notes.add(note)
                _LOG.warning("%s", note)


def describe(report: ArenaReport) -> str:
    """Return one phrase on the memory obtained, for the log and the doctor."""
    parts = [
        f"{format_nbytes(report.reserved_bytes)} held",
        f"{_share(report.huge_page_bytes, report.reserved_bytes)} in huge pages",
        f"{_share(report.locked_bytes, report.reserved_bytes)} page-locked",
    ]
    if report.wants_registration:
        share = _share(report.registered_bytes, report.reserved_bytes)
        is_short = report.registered_bytes < report.reserved_bytes
        parts.append(f"{'ONLY ' if is_short else ''}{share} registered with the device")
    if report.numa_node >= 0:
        parts.append(f"node {report.numa_node}")
    return ", ".join(parts)


def _share(part_bytes: int, whole_bytes: int) -> str:
    return f"{100 * part_bytes / whole_bytes:.0f} %" if whole_bytes else "0 %"
