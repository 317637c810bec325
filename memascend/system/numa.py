"""NUMA topology: which nodes there are, and which one a device or a path is attached to.

Uses libnuma through py-libnuma if that optional extra is installed and works, else sysfs. Never
moves memory: the native core binds it. Every function takes the sysfs root, for tests.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from memascend.system.mounts import SYSFS, block_folder, read_line

_LOG = logging.getLogger(__name__)


def online_nodes(sysfs: Path = SYSFS) -> list[int]:
    """Return the NUMA nodes to allocate from, ascending; none on a kernel without NUMA."""
    if sysfs == SYSFS:
        nodes = _libnuma_nodes()
        if nodes is not None:
            return nodes
    return parse_node_list(read_line(sysfs / "devices/system/node/online"))


def node_of_pci(address: str, sysfs: Path = SYSFS) -> int | None:
    """Return the node of a PCI device (a GPU, say) such as "0000:3b:00.0"; None when unknown.

    nvidia-smi's eight-digit domain and capitals are accepted.
    """
    domain, _, rest = address.lower().partition(":")
    return _known_node(sysfs / "bus/pci/devices" / f"{domain[-4:]:0>4}:{rest}" / "numa_node")


def node_of_block_device(name: str, sysfs: Path = SYSFS) -> int | None:
    """Return the node of a block device by kernel name ("nvme0n1"); None when unknown.

    Walks from the device up to the first ancestor that knows its node: a partition's disk, the
    disk's controller, the controller's PCI device. A device-mapper or md volume has the node that
    all of its parts share.
    """
    start = (sysfs / "class/block" / name).resolve()
    if not start.is_dir():
        return None
    parts = sorted(path.name for path in (start / "slaves").glob("*"))
    if parts:
        nodes = {node_of_block_device(part, sysfs) for part in parts}
        return nodes.pop() if len(nodes) == 1 else None
    return _ancestor_node(start, sysfs.resolve())


def node_of_path(path: str | os.PathLike[str], sysfs: Path = SYSFS) -> int | None:
    """Return the node of a block device, or of the drive below a directory; None if unknown."""
    folder = block_folder(path, sysfs)
    return None if folder is None else node_of_block_device(folder.name, sysfs)


def processors_near(path: str | os.PathLike[str], sysfs: Path = SYSFS) -> list[int]:
    """Return the processors on a drive's node; empty with one node, or if the node is unknown."""
    node = node_of_path(path, sysfs)
    if node is None or len(online_nodes(sysfs)) < 2:
        return []
    return parse_node_list(read_line(sysfs / f"devices/system/node/node{node}/cpulist"))


def preferred_node(
    paths: Iterable[str | os.PathLike[str]] = (),
    *,
    pci_address: str | None = None,
    sysfs: Path = SYSFS,
) -> int | None:
    """Return the node host memory should come from; None leaves the choice to the kernel.

    The device's node wins, since every byte crosses its bus; else the node most of the drives are
    on. None on a machine with one node, and when the drives are evenly spread.
    """
    nodes = online_nodes(sysfs)
    if len(nodes) < 2:
        return None
    if pci_address is not None:
        node = node_of_pci(pci_address, sysfs)
        if node in nodes:
            return node
    votes = Counter(node for path in paths if (node := node_of_path(path, sysfs)) in nodes)
    ranking = votes.most_common(2)
    if not ranking or (len(ranking) == 2 and ranking[0][1] == ranking[1][1]):
        return None
    return ranking[0][0]


def parse_node_list(text: str) -> list[int]:
    """Convert the kernel's "0-2,4" into [0, 1, 2, 4]."""
    nodes: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            nodes.extend(range(int(first), int(last or first) + 1))
    return nodes


def _libnuma_nodes() -> list[int] | None:
    """Return the nodes this process may allocate from, None where py-libnuma does not work."""
    try:
        from numa import info, memory
    except ImportError:
        return None
    except Exception as error:  # AttributeError at import where libnuma.so.1 is missing
        _LOG.debug("py-libnuma cannot be used (%s); reading sysfs instead", error)
        return None
    if not info.numa_available():
        return None
    return sorted(memory.get_allocation_allowed_nodes())


def _ancestor_node(start: Path, root: Path) -> int | None:
    for directory in (start, *start.parents):
        if directory == root:
            return None
        for candidate in (directory / "numa_node", directory / "device/numa_node"):
            node = _known_node(candidate)
            if node is not None:
                return node
    return None


def _known_node(path: Path) -> int | None:
    text = read_line(path)
    return int(text) if text and int(text) >= 0 else None  # the kernel writes -1 for "no node"
