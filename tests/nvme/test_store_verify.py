"""Verification: a bit that turns on a volume is named before anybody sees it, whatever it is in."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from memascend import _core
from memascend.base.components import CHECKSUMS
from memascend.config.block import parse_block
from memascend.errors import ConfigError, CorruptionError, HostMemoryError, StoreError
from memascend.nvme.store import TensorStore
from memascend.plan.checksums import CHECKSUM_BYTES, GRAIN_BYTES, PAGE_SPAN_BYTES, SLAB_BYTES
from memascend.plan.derive import PlanRequest, derive
from memascend.runtime import Runtime
from tests.support.nvme_memory import BOUNCE_BYTES, PageMemory, flip_bit, open_store, read, write
from tests.support.nvme_model import FRACTIONS, StoreModel, run_as_test
from tests.support.plan_models import decoder
from tests.support.small_runtime import build

# -- the checksum ----------------------------------------------------------------------------------


def test_the_published_check_value_comes_out() -> None:
    buffer = ctypes.create_string_buffer(b"123456789")
    address = ctypes.addressof(buffer)
    assert _core.crc32c_methods()[0].name == "tables"
    for method in _core.crc32c_methods():
        assert method.checksum(address=address, nbytes=9) == 0xE3069283
        first = method.checksum(address=address, nbytes=4)
        assert method.checksum(address=address + 4, nbytes=5, previous=first) == 0xE3069283


# -- the store -------------------------------------------------------------------------------------


class VerifiedStoreAgainstDict(StoreModel):
    """Short transfers, retries, reordering, discarded space: nothing right is refused; and one bit

    turned anywhere is found by whoever reads it, and by nobody else.
    """

    @initialize(seed=st.integers(0, 2**32), verify=st.sampled_from(["reads", "full"]))
    def open(self, seed: int, verify: str) -> None:
        faults = _core.MemoryFaults(seed=seed, short=0.3, again=0.1, reorder=0.5, delay=0.1)
        self.name = f"model{seed}"
        self.begin(open_store(Path(self.name), "memory", faults=faults, verify=verify))

    @rule(place=FRACTIONS, bit=st.integers(0, 7))
    def turn_a_bit(self, place: float, bit: int) -> None:
        assert self.store is not None
        self.store.wait_all()
        used_bytes = int(self.store.stats()["used_bytes"])
        if used_bytes == 0:
            return
        offset = int(place * (used_bytes - 1))
        flip_bit(self.name, offset, bit)
        for key, content in self.model.items():
            try:
                assert read(self.store, key, len(content)) == content
            except CorruptionError as error:
                found = (error.key, error.offset)
                assert found == (key, offset // GRAIN_BYTES * GRAIN_BYTES)
        flip_bit(self.name, offset, bit)


TestVerifiedStoreAgainstDict = run_as_test(VerifiedStoreAgainstDict, max_examples=40)


@pytest.fixture(params=["reads", "full"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    with TensorStore(
        volumes=[tmp_path], bounce=PageMemory(BOUNCE_BYTES).tensor, verify=request.param
    ) as opened:
        yield opened


def test_a_bit_turned_in_the_volumes_file_is_named_and_read_by_nobody(
    store: TensorStore, tmp_path: Path
) -> None:
    source = torch.arange(100_000)
    store.write(key="layer.0.weight", source=source).wait()
    store.core.set_recovery("and resume from checkpoint 7")
    flip_bit(str(tmp_path), 5 * GRAIN_BYTES + 17, bit=3)
    with pytest.raises(CorruptionError) as caught:
        store.read(key="layer.0.weight", target=torch.empty(100_000, dtype=torch.int64)).wait()
    error = caught.value
    assert (error.key, error.volume) == ("layer.0.weight", str(tmp_path))
    assert (error.offset, error.nbytes, error.errno) == (
        5 * GRAIN_BYTES,
        GRAIN_BYTES,
        errno.EBADMSG,
    )
    message = str(error)
    for part in ("layer.0.weight", str(tmp_path), str(5 * GRAIN_BYTES), "crc32c", "in two reads"):
        assert part in message
    assert "likely cause" in message
    assert message.endswith("and resume from checkpoint 7")
    stats = store.stats()
    assert (stats["mismatches"], stats["corruptions"]) == (1, 1)
    # Parts beside the grain are sound.
    target = torch.empty(10, dtype=torch.int64)
    store.read(key="layer.0.weight", target=target, offset_bytes=80).wait()
    assert target.tolist() == list(range(10, 20))


def test_a_write_beside_a_turned_bit_does_not_make_it_right(
    store: TensorStore, tmp_path: Path
) -> None:
    store.write(key="w", source=torch.zeros(100_000)).wait()
    flip_bit(str(tmp_path), 100)
    with pytest.raises(CorruptionError, match='"w"'):
        store.write(key="w", source=torch.ones(10), offset_bytes=4000).wait()
    with pytest.raises(CorruptionError, match="an earlier write of it failed"):
        store.read(key="w", target=torch.empty(100_000))
    store.write(key="w", source=torch.ones(100_000)).wait()
    target = torch.empty(100_000)
    store.read(key="w", target=target).wait()
    assert target.eq(1).all()


def test_without_verification_nothing_is_compared_and_nothing_taken(tmp_path: Path) -> None:
    with TensorStore(volumes=[tmp_path], bounce=PageMemory(BOUNCE_BYTES).tensor) as store:
        store.write(key="w", source=torch.zeros(1000)).wait()
        flip_bit(str(tmp_path), 0)
        target = torch.empty(1000)
        store.read(key="w", target=target).wait()
        assert target[0] != 0
        assert store.stats()["bytes_verified"] == store.stats()["checksum_bytes"] == 0
        store.core.provide_checksums(nbytes=1 << 20)
        assert store.stats()["checksum_bytes"] == 0


def test_what_was_written_is_read_back_at_once() -> None:
    faults = _core.MemoryFaults(lost=1.0)
    for verify in ("off", "reads", "full"):
        store = open_store(Path("lost"), "memory", faults=faults, verify=verify)
        ticket = write(store, "k", b"x" * 100_000)
        if verify == "full":
            with pytest.raises(CorruptionError, match="that belong to a write"):
                ticket.wait()
        else:
            ticket.wait()
        assert store.stats()["bytes_read_back"] == 0  # none that matched
        store.close()


def test_a_bit_that_turns_on_its_way_is_read_again() -> None:
    faults = _core.MemoryFaults(seed=1, flip=0.1)
    store = open_store(Path("flips"), "memory", faults=faults, verify="full")
    content = os.urandom(300_000)
    for turn in range(60):
        write(store, f"k{turn % 3}", content).wait()
        assert read(store, f"k{turn % 3}", len(content)) == content
    stats = store.stats()
    assert stats["mismatches"] > 0
    assert stats["corruptions"] == 0
    assert stats["bytes_read_back"] == 60 * 5 * GRAIN_BYTES


def test_an_unknown_way_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="verify must be off, reads or full, got 'writes'"):
        open_store(tmp_path, "memory", verify="writes")
    with pytest.raises(ValueError, match="chunk_bytes must be a positive multiple of 65536"):
        open_store(tmp_path, "memory", verify="reads", chunk_bytes=4096)


# -- memory ----------------------------------------------------------------------------------------


def test_checksums_come_from_the_arena_they_are_given() -> None:
    arena = _core.Allocator(huge_pages="off", lock=False, register_device=False)
    store = open_store(Path("arena"), "memory", verify="reads", checksum_memory=arena)
    assert "checksums" not in arena.components()
    store.reserve(key="k", nbytes=1)
    assert arena.components()["checksums"].live_bytes == SLAB_BYTES
    store.provide_checksums(nbytes=3 * SLAB_BYTES)
    assert arena.components()["checksums"].live_bytes == 3 * SLAB_BYTES
    assert store.stats()["checksum_bytes"] == 3 * SLAB_BYTES
    store.close()
    assert arena.components()["checksums"].live_bytes == 0


def test_without_memory_for_checksums_nothing_is_reserved() -> None:
    limit_bytes = 2 * SLAB_BYTES
    arena = _core.Allocator(
        huge_pages="off", lock=False, register_device=False, limit_bytes=limit_bytes
    )
    faults = _core.MemoryFaults(capacity_bytes=64 << 30)
    store = open_store(
        Path("small"), "memory", verify="reads", checksum_memory=arena, faults=faults
    )
    spans = limit_bytes // SLAB_BYTES * (SLAB_BYTES // CHECKSUM_BYTES * GRAIN_BYTES)
    with pytest.raises(HostMemoryError):
        store.reserve(key="k", nbytes=spans + 1)
    assert store.keys() == []
    assert store.stats()["used_bytes"] == 0
    store.reserve(key="k", nbytes=PAGE_SPAN_BYTES)


# -- config ----------------------------------------------------------------------------------------


def test_the_block_takes_three_words() -> None:
    assert parse_block({}).verify == "off"
    for word in ("off", "reads", "full"):
        assert parse_block({"verify": word}).verify == word
    with pytest.raises(ConfigError, match=r"memascend\.verify"):
        parse_block({"verify": "writes"})
    with pytest.raises(ConfigError, match=r"memascend\.direct_nvme, which is off"):
        parse_block({"verify": "reads", "direct_nvme": {"enabled": False}})
    with pytest.raises(ConfigError, match="chunk_bytes: 66560 is not allowed"):  # whole grains
        parse_block({"verify": "full", "direct_nvme": {"chunk_bytes": 66560}})


# -- the runtime -----------------------------------------------------------------------------------


def open_runtime(folder: Path, verify: str) -> Runtime:
    return build(
        folder,
        block={"verify": verify},
        parameter_budget_bytes=4 << 20,
        staging_slot_bytes=1 << 18,
    )


def test_planned_and_measured_checksums_agree(tmp_path: Path) -> None:
    runtime = open_runtime(tmp_path, "reads")
    runtime.io.write(key="param.0", source=torch.zeros(100_000)).wait()
    runtime.adopt(derive(decoder(), request=PlanRequest(verify="reads")))
    rows = {row.component: row for row in runtime.ledger().rows}
    row = rows[CHECKSUMS]
    assert row.planned_bytes == row.live_bytes == row.peak_bytes > 0
    runtime.io.read(key="param.0", target=torch.empty(100_000)).wait()
    ledger = runtime.ledger()
    assert ledger.drive["bytes_verified"] == 7 * GRAIN_BYTES
    assert "448.00 KiB; 0 mismatched" in ledger.describe()
    runtime.close()


def test_the_error_names_the_last_checkpoint_or_says_that_there_is_none(tmp_path: Path) -> None:
    runtime = open_runtime(tmp_path, "reads")
    runtime.io.write(key="param.0", source=torch.zeros(100_000)).wait()
    flip_bit(str(tmp_path), 8)

    def message() -> str:
        with pytest.raises(StoreError) as caught:
            runtime.io.read(key="param.0", target=torch.empty(100_000)).wait()
        assert isinstance(caught.value, CorruptionError)
        return str(caught.value)

    assert "no checkpoint is at hand" in message()
    runtime.note_checkpoint("/runs/one/global_step7")
    found = message()
    assert "resume from the last complete checkpoint, /runs/one/global_step7" in found
    assert "engine.load_checkpoint('/runs/one', tag='global_step7')" in found
    runtime.close()


def test_a_checkpoint_that_was_saved_or_loaded_is_noted() -> None:
    from memascend.deepspeed.attach import attach as activation
    from memascend.deepspeed.checkpoint import engine as checkpoint

    noted: list[str] = []
    attachment = object.__new__(activation.Attachment)
    attachment.runtime = cast(Runtime, SimpleNamespace(note_checkpoint=noted.append))
    engine = SimpleNamespace(optimizer=SimpleNamespace(attachment=attachment), global_steps=7)
    is_saved, found = True, "/runs/two/best/model_states.pt"
    save = checkpoint.wrap_save_checkpoint(lambda *_, **__: is_saved)
    load = checkpoint.wrap_load_checkpoint(lambda *_, **__: (found, {}))
    save(engine, "/runs/one")
    save(engine, "/runs/one", tag="mine")
    load(engine, "/runs/two")
    assert noted == ["/runs/one/global_step7", "/runs/one/mine", "/runs/two/best"]
    is_saved, found = False, None
    save(engine, "/runs/one")
    load(engine, "/runs/two")
    assert len(noted) == 3


def test_what_is_written_is_counted_as_the_drive_wears(tmp_path):
    """A grain is written whole, and read before where the rest of it stays."""
    store = open_store(tmp_path, "auto", verify="reads")
    write(store, "k", bytes(4 * GRAIN_BYTES)).wait()
    write(store, "k", bytes(8 << 10), offset=GRAIN_BYTES + 4096).wait()
    stats = store.stats()
    store.close()
    assert stats["bytes_written"] == 5 * GRAIN_BYTES
    assert stats["bytes_read"] == GRAIN_BYTES
