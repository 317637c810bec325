"""NUMA topology read from a made-up sysfs."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

from memascend.system import numa


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two nodes; a GPU on node 1; nvme0 on node 0, nvme1 on node 1; an md volume over both."""
    write(tmp_path / "devices/system/node/online", "0-1\n")
    write(tmp_path / "bus/pci/devices/0000:3b:00.0/numa_node", "1\n")
    write(tmp_path / "bus/pci/devices/0000:3c:00.0/numa_node", "-1\n")
    block = tmp_path / "class/block"
    block.mkdir(parents=True)
    for index in (0, 1):
        controller = tmp_path / f"devices/pci/0000:0{index}:00.0"
        write(controller / "numa_node", f"{index}\n")
        disk = controller / f"nvme/nvme{index}/nvme{index}n1"
        (disk / f"nvme{index}n1p1").mkdir(parents=True)
        (block / f"nvme{index}n1").symlink_to(disk)
        (block / f"nvme{index}n1p1").symlink_to(disk / f"nvme{index}n1p1")
    for name, parts in (("md0", (0, 1)), ("md1", (1,))):
        for index in parts:
            (tmp_path / f"devices/virtual/block/{name}/slaves/nvme{index}n1").mkdir(parents=True)
        (block / name).symlink_to(tmp_path / f"devices/virtual/block/{name}")
    (tmp_path / "dev/block").mkdir(parents=True)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def place_on(sysfs: Path, path: Path, device: str) -> None:
    """Makes the drive behind an existing path look like `device`."""
    number = os.stat(path).st_dev
    link = sysfs / "dev/block" / f"{os.major(number)}:{os.minor(number)}"
    link.symlink_to((sysfs / "class/block" / device).resolve())


@pytest.mark.parametrize(
    ("text", "nodes"),
    [("0\n", [0]), ("0-2,4\n", [0, 1, 2, 4]), ("1,3-4", [1, 3, 4]), ("", [])],
)
def test_a_kernel_list_is_expanded(text: str, nodes: list[int]) -> None:
    assert numa.parse_node_list(text) == nodes


def test_processors_near_a_drive_are_those_of_its_node(sysfs: Path, tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    for node, cpus in enumerate(("0-1,4", "2-3")):
        write(sysfs / f"devices/system/node/node{node}/cpulist", cpus)
    assert numa.processors_near(drive, sysfs) == []  # unknown
    place_on(sysfs, drive, "nvme0n1")
    assert numa.processors_near(drive, sysfs) == [0, 1, 4]
    write(sysfs / "devices/system/node/online", "0\n")
    assert numa.processors_near(drive, sysfs) == []


def test_online_nodes_are_read(sysfs: Path) -> None:
    assert numa.online_nodes(sysfs) == [0, 1]


@pytest.mark.parametrize("address", ["0000:3b:00.0", "00000000:3B:00.0"])
def test_a_gpu_has_the_node_of_its_pci_device(sysfs: Path, address: str) -> None:
    assert numa.node_of_pci(address, sysfs) == 1


@pytest.mark.parametrize("address", ["0000:3c:00.0", "0000:ff:00.0"])
def test_a_pci_device_without_a_node_has_none(sysfs: Path, address: str) -> None:
    assert numa.node_of_pci(address, sysfs) is None


@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("nvme0n1", 0),
        ("nvme1n1", 1),
        ("nvme1n1p1", 1),
        ("md0", None),
        ("md1", 1),
        ("sdz", None),
    ],
)
def test_a_block_device_has_the_node_of_its_controller(
    sysfs: Path, name: str, node: int | None
) -> None:
    assert numa.node_of_block_device(name, sysfs) == node


def test_a_path_has_the_node_of_its_drive(sysfs: Path, tmp_path: Path) -> None:
    assert numa.node_of_path(tmp_path, sysfs) is None
    place_on(sysfs, tmp_path, "nvme1n1p1")
    assert numa.node_of_path(tmp_path, sysfs) == 1


def test_the_gpu_decides_over_the_drives(sysfs: Path, tmp_path: Path) -> None:
    place_on(sysfs, tmp_path, "nvme0n1")
    assert numa.preferred_node([tmp_path], sysfs=sysfs) == 0
    assert numa.preferred_node([tmp_path], pci_address="0000:3b:00.0", sysfs=sysfs) == 1
    assert numa.preferred_node([tmp_path], pci_address="0000:3c:00.0", sysfs=sysfs) == 0


def test_evenly_spread_drives_leave_the_choice_to_the_kernel(
    sysfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = {"a": 0, "b": 1, "c": 1}
    monkeypatch.setattr(numa, "node_of_path", lambda path, _: nodes[path])
    assert numa.preferred_node(["a", "b"], sysfs=sysfs) is None
    assert numa.preferred_node(["a", "b", "c"], sysfs=sysfs) == 1


def test_one_node_leaves_the_choice_to_the_kernel(sysfs: Path, tmp_path: Path) -> None:
    place_on(sysfs, tmp_path, "nvme0n1")
    write(sysfs / "devices/system/node/online", "0\n")
    assert numa.preferred_node([tmp_path], sysfs=sysfs) is None


def test_a_kernel_without_numa_has_no_nodes(tmp_path: Path) -> None:
    assert numa.online_nodes(tmp_path) == []
    assert numa.preferred_node([tmp_path], sysfs=tmp_path) is None


def test_py_libnuma_without_its_library_falls_back_to_sysfs(
    sysfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "stub/numa/__init__.py", "raise AttributeError('numa_num_possible_nodes')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "stub"))
    for name in [name for name in sys.modules if name.split(".")[0] == "numa"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(numa, "SYSFS", sysfs)
    assert numa.online_nodes(sysfs) == [0, 1]


def test_py_libnuma_is_asked_first_on_the_real_machine(
    sysfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = types.ModuleType("numa")
    stub.info = types.SimpleNamespace(numa_available=lambda: True)
    stub.memory = types.SimpleNamespace(get_allocation_allowed_nodes=lambda: [3, 1])
    monkeypatch.setitem(sys.modules, "numa", stub)
    assert numa.online_nodes() == [1, 3]
    assert numa.online_nodes(sysfs) == [0, 1]
