"""What a raw device holds after SIGKILL: the data, until it is encrypted below or wiped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memascend.volumes.device import claimed, format_device, wipe_device
from tests.support.loop_devices import encrypted_device, loop_device
from tests.support.store_programs import start

pytestmark = pytest.mark.root

MARKER_BYTES = 1 << 20
PROGRAM = """
import torch
from memascend.config.block import parse_block
from memascend.nvme.store import TensorStore
from memascend.volumes.prepare import prepared
from tests.support.nvme_memory import BOUNCE_BYTES, PageMemory
marker = Path(sys.argv[2]).read_bytes()
block = {"volumes": [{"path": str(directory), "raw": True, "weight": 1}]}
with prepared(parse_block(block | {"direct_nvme": {"engine": "threads"}}), "unused") as volumes:
    bounce = PageMemory(BOUNCE_BYTES).tensor
    store = TensorStore(volumes=volumes, bounce=bounce, engine="threads")
source = torch.frombuffer(bytearray(marker), dtype=torch.uint8)
store.write(key="k", source=source).wait()
print("written", flush=True)
signal.pause()
"""


def write_and_die(device: str, folder: Path) -> bytes:
    """Has a run store something on a device and kills it; returns what was stored."""
    marker = os.urandom(MARKER_BYTES)
    (folder / "marker").write_bytes(marker)
    with claimed(device) as opened:
        format_device(opened, owner_uid=os.geteuid())
    with start(Path(device), PROGRAM, str(folder / "marker")) as run:
        assert run.stdout is not None
        line = run.stdout.readline()
        run.kill()
        _, errors = run.communicate(timeout=60)
    assert line == "written\n", errors
    return marker


def content(device: str) -> bytes:
    # Past pages that were cached before the drive was written to.
    descriptor = os.open(device, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return Path(device).read_bytes()


def test_a_killed_run_leaves_its_data_on_a_raw_device_until_that_is_wiped(tmp_path: Path) -> None:
    with loop_device(tmp_path) as device:
        marker = write_and_die(device, tmp_path)
        assert marker in content(device)
        with claimed(device) as opened:
            assert wipe_device(opened), "loop devices discard"
        assert marker not in content(device)


def test_a_killed_run_leaves_nothing_readable_on_an_encrypted_device(tmp_path: Path) -> None:
    with loop_device(tmp_path) as device:
        with encrypted_device(device, f"memascend-test-{os.getpid()}") as mapped:
            marker = write_and_die(mapped, tmp_path)
            assert marker in content(mapped)
        assert marker not in content(device)
