"""Registered memory: pieces go back when nothing is in them, against a stand-in for libcuda."""

from __future__ import annotations

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
from tests.support.fake_cuda import FakeCuda, make_core

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
                self.everything_free_has_gone_back()
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
