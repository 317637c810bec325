"""Registered memory: pieces go back when nothing is in them, against a stand-in for libcuda.

And what any registrar in Python may do while the allocator holds its lock.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from memascend import _core
from memascend.base.units import MIB
from memascend.errors import HostMemoryError
from tests.support.examples import examples
from tests.support.fake_cuda import FakeCuda, make_core, registering_core

PAGE_BYTES = 4096


class RegisteringAllocatorAgainstModel(RuleBasedStateMachine):
    """Random blocks in registered memory under a limit, against what the driver has registered."""

    cuda: FakeCuda
    limit_bytes: int

    def __init__(self) -> None:
        super().__init__()
        self.cuda.library.fake_reset(0, 1)
        self.refuses = False
        self.core = make_core(self.cuda, limit_bytes=self.limit_bytes)
        self.live: list[tuple[_core.Block, int]] = []
        self.mark = 0

    @rule(
        nbytes=st.one_of(
            st.integers(1, 3 * PAGE_BYTES),
            st.integers(1, 6 * MIB),
            st.sampled_from([2 * MIB, 4 * MIB, 12 * MIB]),
        ),
        zero=st.booleans(),
    )
    def allocate(self, nbytes: int, zero: bool) -> None:
        held = self.core.stats().reserved_bytes
        try:
            block = self.core.allocate(nbytes=nbytes, component="weights", zero=zero)
        except HostMemoryError:
            if not self.refuses:
                used = sum(block.capacity_bytes for block, _ in self.live)
                assert self.core.stats().reserved_bytes == used
            capacity_bytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
            assert self.core.stats().reserved_bytes + capacity_bytes > self.limit_bytes
            return
        view = memoryview(block)
        if zero:
            assert not any(view)
        self.mark = self.mark % 255 + 1
        view[:] = bytes([self.mark]) * nbytes
        self.live.append((block, self.mark))
        if self.refuses:
            assert self.core.stats().reserved_bytes >= held

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block, mark = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        assert bytes(memoryview(block)) == bytes([mark]) * block.nbytes

    @rule()
    def trim(self) -> None:
        held = self.core.stats().reserved_bytes
        self.core.trim()
        if self.refuses:
            assert self.core.stats().reserved_bytes == held
        else:
            self.everything_free_has_gone_back()

    @rule(refuses=st.booleans())
    def let_the_driver_refuse(self, refuses: bool) -> None:
        self.refuses = refuses
        self.cuda.library.fake_refuse_unregister(int(refuses))

    @invariant()
    def the_driver_knows_what_is_held(self) -> None:
        assert self.core.is_valid()
        held = self.core.stats().reserved_bytes
        assert held <= (self.limit_bytes or held)
        registrations = self.cuda.registrations()
        assert sum(map(len, registrations)) == held
        for block, _ in self.live:
            last = block.address + block.capacity_bytes - 1
            assert any(block.address in one and last in one for one in registrations)

    def everything_free_has_gone_back(self) -> None:
        for one in self.cuda.registrations():
            assert any(block.address in one for block, _ in self.live)

    def teardown(self) -> None:
        for block, mark in self.live:
            assert bytes(memoryview(block)) == bytes([mark]) * block.nbytes
        self.cuda.library.fake_refuse_unregister(0)


class DictRegistrar:
    """A registrar in Python, with what a test wants it to do meanwhile."""

    def __init__(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.live: dict[int, int] = {}
        self.idle_waits = 0
        self.refuses = ""
        self.meanwhile = meanwhile

    def register(self, address: int, nbytes: int) -> str:
        self.meanwhile()
        if not self.refuses:
            self.live[address] = nbytes
        return self.refuses

    def unregister(self, address: int, nbytes: int) -> str:
        assert self.live.pop(address) == nbytes
        return ""

    def unregister_when_idle(self, address: int, nbytes: int) -> str:
        self.idle_waits += 1
        return self.refuses or self.unregister(address, nbytes)

    def core(self, *, limit_bytes: int = 0) -> _core.Allocator:
        return registering_core(limit_bytes=limit_bytes, registrar=self)


STATE_MACHINE = settings(
    max_examples=examples(40),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(scope="module")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> FakeCuda:
    return FakeCuda(tmp_path_factory.mktemp("cuda"))


@pytest.mark.parametrize("limit_bytes", [0, 12 * MIB])
def test_registered_pieces_against_model(fake_cuda: FakeCuda, limit_bytes: int) -> None:
    class Machine(RegisteringAllocatorAgainstModel):
        pass

    Machine.cuda, Machine.limit_bytes = fake_cuda, limit_bytes
    run_state_machine_as_test(Machine, settings=STATE_MACHINE)


def test_what_the_driver_keeps_is_noted_and_serves_again(fake_cuda: FakeCuda) -> None:
    fake_cuda.library.fake_reset(0, 1)
    core = make_core(fake_cuda)
    address = core.allocate(nbytes=4 * MIB, component="weights").address
    fake_cuda.library.fake_refuse_unregister(1)
    core.trim()
    assert core.stats().reserved_bytes == core.report().registered_bytes == 4 * MIB
    assert any("free host memory stays" in note for note in core.notes())
    assert core.allocate(nbytes=4 * MIB, component="weights").address == address
    fake_cuda.library.fake_refuse_unregister(0)
    core.trim()
    assert core.stats().reserved_bytes == 0


def test_memory_taken_before_the_device_was_in_use_is_registered_with_the_next(
    fake_cuda: FakeCuda,
) -> None:
    fake_cuda.library.fake_reset(0, 0)
    core = make_core(fake_cuda)
    early = core.allocate(nbytes=4 * MIB, component="weights")
    assert (core.stats().reserved_bytes, core.report().registered_bytes) == (4 * MIB, 0)
    fake_cuda.library.fake_give_context()
    late = core.allocate(nbytes=2 * MIB, component="weights")
    assert core.report().registered_bytes == core.stats().reserved_bytes == 6 * MIB
    assert {one.start for one in fake_cuda.registrations()} == {early.address, late.address}
    assert core.is_valid()


def test_what_was_refused_for_its_size_alone_keeps_nothing_else_from_being_registered(
    fake_cuda: FakeCuda,
) -> None:
    fake_cuda.library.fake_reset(0, 1)
    fake_cuda.library.fake_refuse_from(8 * MIB)
    core = make_core(fake_cuda)
    blocks = [core.allocate(nbytes=n * MIB, component="weights") for n in (8, 2, 4)]
    assert core.stats().registered_bytes == 6 * MIB
    assert any(str(8 * MIB) in note for note in core.notes())
    del blocks
    core.trim()
    assert core.stats().reserved_bytes == core.stats().registered_bytes == 0
    assert fake_cuda.registrations() == []


def test_a_hole_in_a_piece_goes_back_rather_than_that_memory_is_refused(
    fake_cuda: FakeCuda,
) -> None:
    fake_cuda.library.fake_reset(0, 1)
    core = make_core(fake_cuda, limit_bytes=12 * MIB)
    whole = core.allocate(nbytes=8 * MIB, component="building")
    del whole
    kept = core.allocate(nbytes=3 * MIB, component="weights")
    memoryview(kept)[:] = bytes([7]) * kept.nbytes
    assert core.stats().reserved_bytes == 8 * MIB
    block = core.allocate(nbytes=9 * MIB, component="scratch")
    assert core.stats().reserved_bytes == core.stats().registered_bytes == 12 * MIB
    assert sum(map(len, fake_cuda.registrations())) == 12 * MIB
    assert bytes(memoryview(kept)) == bytes([7]) * kept.nbytes
    with pytest.raises(HostMemoryError):
        core.allocate(nbytes=1, component="more")
    del block
    core.allocate(nbytes=9 * MIB, component="scratch")


def test_without_any_library_no_memory_is_kept_in_pieces() -> None:
    core = _core.Allocator(
        huge_pages="off", lock=False, register_device=True, cuda_library="libnothere.so.1"
    )
    core.allocate(nbytes=MIB, component="weights")
    report = core.report()
    assert report.wants_registration
    assert report.registered_bytes == 0
    assert any("libnothere" in note for note in report.notes)


def test_a_registrar_in_python_has_what_is_held_until_it_goes_back() -> None:
    registrar = DictRegistrar()
    core = registrar.core()
    first = core.allocate(nbytes=3 * MIB, component="weights")
    second = core.allocate(nbytes=2 * MIB, component="weights")
    assert registrar.live == {first.address: 4 * MIB, second.address: 2 * MIB}
    del first
    core.trim()
    assert registrar.idle_waits == 1
    assert registrar.live == {second.address: 2 * MIB}
    del core
    assert registrar.live
    del second
    assert registrar.live == {}
    assert registrar.idle_waits == 2  # a copy may be in flight, and the memory is unmapped next


def test_what_a_registrar_in_python_refuses_or_raises_is_a_note() -> None:
    registrar = DictRegistrar()
    registrar.refuses = "out of room"
    core = registrar.core()
    block = core.allocate(nbytes=2 * MIB, component="weights")
    assert core.stats().registered_bytes == 0
    assert any("out of room" in note for note in core.notes())

    def fail() -> None:
        raise RuntimeError("the device is gone")

    registrar.meanwhile = fail
    other = core.allocate(nbytes=2 * MIB, component="weights")
    assert any("the device is gone" in note for note in core.notes())
    registrar.meanwhile, registrar.refuses = lambda: None, ""
    last = core.allocate(nbytes=2 * MIB, component="weights")
    assert set(registrar.live) == {block.address, other.address, last.address}
    registrar.refuses = "busy"
    del last
    core.trim()
    assert core.stats().reserved_bytes == core.stats().registered_bytes == 6 * MIB
    registrar.refuses = ""


def test_blocks_are_freed_while_a_registrar_in_python_runs() -> None:
    """The collector may run in it, and take tensors that lie in the arena."""
    garbage: list[_core.Block] = []
    registrar = DictRegistrar()
    core = registrar.core()
    garbage += [core.allocate(nbytes=2 * MIB, component="weights") for _ in range(3)]

    def collect() -> None:
        garbage.clear()
        gc.collect()

    registrar.meanwhile = collect
    block = core.allocate(nbytes=8 * MIB, component="weights")
    assert garbage == []
    assert core.components()["weights"].live_bytes == block.nbytes
    assert core.is_valid()


def test_another_thread_frees_blocks_while_a_registrar_in_python_runs() -> None:
    """That thread has Python's lock, which the registrar gave up and needs again."""
    garbage: list[_core.Block] = []
    registrar = DictRegistrar()
    core = registrar.core()
    garbage.append(core.allocate(nbytes=2 * MIB, component="weights"))
    begin, freed = threading.Event(), threading.Event()

    def free() -> None:
        assert begin.wait(60)
        garbage.clear()
        freed.set()

    def let_it_free() -> None:
        begin.set()
        assert freed.wait(60)

    registrar.meanwhile = let_it_free
    thread = threading.Thread(target=free)
    thread.start()
    block = core.allocate(nbytes=8 * MIB, component="weights")
    thread.join()
    assert core.components()["weights"].live_bytes == block.nbytes
    assert core.is_valid()


def test_a_forked_child_takes_no_registration_back() -> None:
    registrar = DictRegistrar()
    core = registrar.core()
    block = core.allocate(nbytes=2 * MIB, component="weights")
    child = os.fork()
    if child == 0:
        del block, core
        os._exit(len(registrar.live))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert set(registrar.live) == {block.address}
