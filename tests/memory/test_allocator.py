"""The allocator: its bound on held bytes, intact contents, lifetimes, doing without rights."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import textwrap
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from memascend import _core
from memascend.base.units import KIB, MIB
from memascend.errors import HostMemoryError, MemAscendError
from memascend.memory.allocator import HostAllocator
from tests.support.examples import examples

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 * MIB
COMPONENTS = ("weights", "gradients", "staging")


def make_core(**options: object) -> _core.Allocator:
    # Transparent, since explicit huge pages cannot be given back and are exempt from the bound.
    arguments: dict[str, object] = {
        "huge_pages": "transparent",
        "lock": False,
        "register_device": False,
    }
    return _core.Allocator(**(arguments | options))


class AllocatorAgainstModel(RuleBasedStateMachine):
    """Random allocate, free and trim against a dictionary of what must be true."""

    lock = False
    huge_pages = "transparent"

    def __init__(self) -> None:
        super().__init__()
        self.core = make_core(lock=self.lock, huge_pages=self.huge_pages)
        self.live: list[tuple[_core.Block, str, int]] = []
        self.peaks = dict.fromkeys(COMPONENTS, 0)
        self.mark = 0

    @rule(
        nbytes=st.one_of(
            st.integers(1, 3 * PAGE_BYTES),
            st.integers(1, 300 * KIB),
            st.integers(1, 5 * MIB),
            st.sampled_from([PAGE_BYTES, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 1]),
        ),
        component=st.sampled_from(COMPONENTS),
        zero=st.booleans(),
    )
    def allocate(self, nbytes: int, component: str, zero: bool) -> None:
        before = self.core.stats().reserved_bytes
        block = self.core.allocate(nbytes=nbytes, component=component, zero=zero)
        view = memoryview(block)
        assert view.nbytes == nbytes
        assert block.address % PAGE_BYTES == 0
        assert block.capacity_bytes == -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        if zero:
            assert not any(view)
        self.mark = self.mark % 255 + 1
        view[:] = bytes([self.mark]) * nbytes
        self.live.append((block, component, self.mark))
        stats = self.core.stats()
        self.peaks[component] = max(self.peaks[component], self.live_bytes(component))
        if stats.reserved_bytes > before:
            allowed = stats.requested_bytes + len(self.live) * PAGE_BYTES + HUGE_PAGE_BYTES
            assert stats.reserved_bytes <= allowed

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block, _, mark = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.check_contents(block, mark)
        address = block.address
        del block
        assert not self.core.contains(address)

    @rule()
    def trim(self) -> None:
        self.core.trim()
        stats = self.core.stats()
        assert stats.reserved_bytes == stats.used_bytes

    @invariant()
    def counts_agree(self) -> None:
        assert self.core.is_valid()
        stats = self.core.stats()
        assert stats.block_count == len(self.live)
        assert stats.requested_bytes == sum(block.nbytes for block, _, _ in self.live)
        assert stats.used_bytes == sum(block.capacity_bytes for block, _, _ in self.live)
        assert stats.peak_reserved_bytes >= stats.reserved_bytes >= stats.used_bytes
        components = self.core.components()
        for name in COMPONENTS:
            expected = (self.live_bytes(name), self.peaks[name])
            found = components.get(name)
            assert ((found.live_bytes, found.peak_bytes) if found else (0, 0)) == expected

    @invariant()
    def blocks_are_apart(self) -> None:
        spans = sorted((block.address, block.capacity_bytes) for block, _, _ in self.live)
        for (address, capacity_bytes), (next_address, _) in pairwise(spans):
            assert address + capacity_bytes <= next_address

    def teardown(self) -> None:
        for block, _, mark in self.live:
            self.check_contents(block, mark)

    def live_bytes(self, component: str) -> int:
        return sum(block.nbytes for block, name, _ in self.live if name == component)

    @staticmethod
    def check_contents(block: _core.Block, mark: int) -> None:
        assert bytes(memoryview(block)) == bytes([mark]) * block.nbytes


class LockedAllocatorAgainstModel(AllocatorAgainstModel):
    lock = True
    huge_pages = "off"


STATE_MACHINE = settings(
    max_examples=examples(40),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestAllocatorAgainstModel = AllocatorAgainstModel.TestCase
TestAllocatorAgainstModel.settings = STATE_MACHINE
TestLockedAllocatorAgainstModel = LockedAllocatorAgainstModel.TestCase
TestLockedAllocatorAgainstModel.settings = settings(STATE_MACHINE, max_examples=examples(15))


def test_a_tensor_view_keeps_its_memory_alive() -> None:
    allocator = HostAllocator(lock=False)
    tensor = allocator.tensor(1000, torch.float32, component="weights", zero=True)
    alias = torch.nn.Parameter(tensor.view(10, 100).narrow(0, 3, 2)).data
    alias.fill_(7)
    core = allocator.core
    del tensor, allocator
    gc.collect()
    assert core.stats().block_count == 1
    assert core.contains(alias.data_ptr())
    assert alias.sum().item() == 1400
    del alias
    gc.collect()
    assert core.stats().block_count == 0


def test_memory_stays_mapped_after_the_allocator_is_gone() -> None:
    tensor = HostAllocator(lock=False).tensor(4096, torch.uint8, component="weights")
    gc.collect()
    tensor.fill_(9)
    assert tensor.sum().item() == 9 * 4096


def test_zero_elements_need_no_block() -> None:
    allocator = HostAllocator(lock=False)
    assert allocator.tensor(0, torch.bfloat16, component="weights").shape == (0,)
    assert allocator.core.stats().block_count == 0


def test_zero_clears_reused_memory() -> None:
    core = make_core()
    first = core.allocate(nbytes=10000, component="weights")
    memoryview(first)[:] = b"x" * 10000
    address = first.address
    del first
    again = core.allocate(nbytes=10000, component="weights", zero=True)
    assert again.address == address
    assert not any(memoryview(again))


def test_the_process_really_holds_what_stats_say() -> None:
    core = make_core()
    blocks = [core.allocate(nbytes=6 * MIB, component="weights") for _ in range(3)]
    del blocks[1]
    blocks.append(core.allocate(nbytes=14 * MIB, component="weights"))  # the hole goes back
    blocks.append(core.allocate(nbytes=300 * KIB, component="weights"))  # backs part of the hole
    assert blocks[0].address < blocks[-1].address < blocks[1].address
    report = core.report()
    if report.resident_bytes == 0:
        pytest.skip("no /proc/self/smaps here")
    assert report.reserved_bytes == core.stats().reserved_bytes
    assert report.resident_bytes == report.reserved_bytes == 26 * MIB + 300 * KIB


def test_beyond_the_limit_the_error_names_the_largest_component() -> None:
    core = make_core(limit_bytes=8 * MIB)
    kept = core.allocate(nbytes=6 * MIB, component="weights")
    with pytest.raises(
        HostMemoryError, match=r"'gradients'.*limit is 8\.0 MiB.*weights 6\.0 MiB"
    ) as info:
        core.allocate(nbytes=3 * MIB, component="gradients")
    assert isinstance(info.value, MemoryError)
    assert isinstance(info.value, MemAscendError)
    assert info.value.limit_bytes == 8 * MIB
    assert info.value.reserved_bytes == 6 * MIB
    assert core.is_valid()
    del kept
    core.allocate(nbytes=8 * MIB, component="gradients")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"nbytes": 0, "component": "x"}, "positive"), ({"nbytes": 1, "component": ""}, "component")],
)
def test_a_senseless_request_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_core().allocate(**arguments)


def test_an_unknown_kind_of_huge_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="huge_pages must be auto"):
        make_core(huge_pages="gigantic")


def test_explicit_huge_pages_are_used_or_noted_as_missing() -> None:
    core = make_core(huge_pages="explicit")
    block = core.allocate(nbytes=4 * MIB, component="weights")
    memoryview(block)[:] = b"x" * block.nbytes
    noted = any("explicit huge pages" in note for note in core.notes())
    assert noted == (_explicit_huge_page_bytes() < 4 * MIB)


def test_where_huge_pages_were_taken_away_ordinary_ones_serve() -> None:
    script = textwrap.dedent(
        """
        import ctypes
        from memascend import _core
        PR_SET_THP_DISABLE = 41
        assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
        for kind in ("auto", "transparent", "explicit"):
            core = _core.Allocator(huge_pages=kind, lock=False, register_device=False)
            block = core.allocate(nbytes=64 << 20, component="pool")
            memoryview(block)[:] = bytes(64 << 20)
        """
    )
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr


def test_threads_share_an_allocator() -> None:
    core = make_core()
    damaged: list[int] = []

    def work(mark: int) -> None:
        for step in range(60):
            block = core.allocate(nbytes=1 + step * 9973, component="weights")
            view = memoryview(block)
            view[:] = bytes([mark]) * block.nbytes
            if bytes(view) != bytes([mark]) * block.nbytes:
                damaged.append(mark)
            del view, block

    threads = [threading.Thread(target=work, args=(mark,)) for mark in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not damaged
    assert core.is_valid()
    assert core.stats().block_count == 0


def _explicit_huge_page_bytes() -> int:
    """Bytes this process has in explicit huge pages."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("HugetlbPages:"):
            return int(line.split()[1]) * KIB
    return 0


UNPRIVILEGED = textwrap.dedent(
    """
    import os, resource, sys, logging
    from types import SimpleNamespace
    import torch
    from memascend import _core
    from memascend.memory.allocator import HostAllocator
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
    limit_bytes = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit_bytes, limit_bytes))
    if os.getuid() == 0:
        os.setgid(65534)
        os.setuid(65534)  # drops CAP_IPC_LOCK
    answer = {"registered": "", "refused": "no room in the map"}.get(sys.argv[2])
    registrar = SimpleNamespace(
        register=lambda *_: answer, unregister=lambda *_: "", unregister_when_idle=lambda *_: ""
    )
    allocator = HostAllocator(
        huge_pages="off", register_device=answer is not None, registrar=registrar
    )
    tensors = [
        allocator.tensor(64 << 20, torch.uint8, component="pool", zero=True) for _ in range(2)
    ]
    tensors[0][:8] = torch.tensor(list(b"survived"))
    report = allocator.core.report()
    print(bytes(tensors[0][:8].tolist()).decode(), report.locked_bytes, len(report.notes))
    """
)


@pytest.mark.parametrize("limit_bytes", [0, 8 * MIB])
def test_without_the_right_to_lock_memory_it_goes_on_and_says_so_once(limit_bytes: int) -> None:
    *warnings, result = unprivileged(limit_bytes, "no device")
    assert result == "survived 0 1"
    assert len(warnings) == 1
    assert f"RLIMIT_MEMLOCK) is {limit_bytes // KIB} KiB" in warnings[0]
    assert "ulimit -l unlimited" in warnings[0]


@pytest.mark.parametrize(("device", "count"), [("registered", 0), ("refused", 2)])
def test_what_the_devices_driver_pins_needs_no_right_to_lock_memory(
    device: str, count: int
) -> None:
    *warnings, result = unprivileged(0, device)
    assert result == f"survived 0 {count}"
    assert [warning.partition(":")[0] for warning in warnings] == [
        "host memory is not registered with the device, copies to and from it block",
        "host memory is not page-locked",
    ][:count]


def unprivileged(limit_bytes: int, device: str) -> list[str]:
    """Return what a process logs and prints that may lock so many bytes."""
    child = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED, str(limit_bytes), device],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert child.returncode == 0, child.stderr
    return child.stdout.splitlines()


def test_an_address_space_limit_leaves_room_for_others() -> None:
    script = textwrap.dedent(
        """
        import resource
        from memascend import _core
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        core = _core.Allocator(huge_pages="off", lock=False, register_device=False)
        block = core.allocate(nbytes=64 << 20, component="pool")
        other = bytearray(64 << 20)
        """
    )
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr


def test_registration_without_cuda_is_noted_and_done_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with caplog.at_level(logging.WARNING):
        allocator = HostAllocator(lock=False, register_device=True)
        allocator.tensor(10, torch.float32, component="pool")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "not registered with the device" in caplog.text
    assert allocator.core.report().registered_bytes == 0


def test_what_was_obtained_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        allocator = HostAllocator(lock=False)
        for _ in range(2):
            allocator.tensor(1 * MIB, torch.float32, component="pool")
    lines = [record.message for record in caplog.records if record.levelname == "INFO"]
    assert len(lines) == 1
    assert lines[0].startswith("host memory: 4.00 MiB held")


def test_two_allocators_do_not_know_each_others_tensors() -> None:
    first, second = HostAllocator(lock=False), HostAllocator(lock=False)
    tensor = first.tensor(10, torch.float32, component="pool")
    assert first.contains(tensor)
    assert not second.contains(tensor)
    assert not first.contains(torch.zeros(1))


@pytest.mark.gpu
def test_registered_memory_is_pinned_for_torch() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.zeros(1, device="cuda")
    allocator = HostAllocator(register_device=True)
    tensor = allocator.tensor(1 << 20, torch.float32, component="pool", zero=True)
    assert tensor.is_pinned()
    assert tensor.to("cuda", non_blocking=True).sum().item() == 0
    assert allocator.core.report().registered_bytes >= tensor.nbytes
