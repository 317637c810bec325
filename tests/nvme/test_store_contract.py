"""Every store behind `TensorIO` keeps one contract: ours, stock's files, the fakes of tests."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memascend.base.units import PAGE_BYTES
from memascend.nvme.resident import ResidentStore
from memascend.nvme.store import TensorStore
from tests.support.nvme_memory import BOUNCE_BYTES, PageMemory
from tests.support.streaming_fakes import FakeRangeStore, FakeStore
from tests.support.streaming_hosts import HostTensors, memory_store

NUMEL = PAGE_BYTES


def on_drive(folder: Path) -> TensorStore:
    return TensorStore(volumes=[folder], bounce=PageMemory(BOUNCE_BYTES).tensor, engine="threads")


def resident(folder: Path) -> ResidentStore:
    """Has room for one key in memory; others go to the drive."""
    store = ResidentStore(on_drive(folder), stream_of=lambda key: "weights")
    store.grant({"weights": 4 * NUMEL}, memory=HostTensors(), component="cache")
    return store


def stock_files(folder: Path) -> Any:
    builders = pytest.importorskip("deepspeed.ops.op_builder")
    if not builders.AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("DeepSpeed's async_io op needs libaio")
    from memascend.deepspeed.stock.memory import AioFileStore

    handle = builders.AsyncIOBuilder().load(verbose=False).aio_handle(1 << 20, 8, False, True, 1)
    return AioFileStore(handle, str(folder / "files"))


#: By name: how to make it, and whether it serves parts of a key.
STORES: dict[str, tuple[Callable[[Path], Any], bool]] = {
    "drive": (on_drive, True),
    "memory engine": (lambda folder: memory_store(), True),
    "resident": (resident, True),
    "stock's files": (stock_files, False),
    "fake of parts": (lambda folder: FakeRangeStore(), True),
    "fake of whole keys": (lambda folder: FakeStore(), False),
}
IN_PARTS = [name for name, (_, has_parts) in STORES.items() if has_parts]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    made = STORES[request.param][0](tmp_path)
    yield made
    made.wait_all()
    if hasattr(made, "close"):
        made.close()


def values(seed: int) -> torch.Tensor:
    tensor = HostTensors().tensor(NUMEL, torch.float32, component="test")
    return tensor.copy_(torch.arange(NUMEL) + 1000 * seed)


def empty() -> torch.Tensor:
    return HostTensors().tensor(NUMEL, torch.float32, component="test")


def read(store: Any, key: str) -> torch.Tensor:
    target = empty()
    ticket = store.read(key=key, target=target)
    ticket.wait()
    assert ticket.done()
    return target


def test_what_is_written_is_read_by_its_key(store: Any) -> None:
    tickets = [store.write(key=f"param.{seed}", source=values(seed)) for seed in range(3)]
    for ticket in tickets:
        ticket.wait()
    for seed in (2, 0, 1):
        assert torch.equal(read(store, f"param.{seed}"), values(seed))


def test_a_read_sees_the_write_before_it_and_not_the_one_behind(store: Any) -> None:
    store.write(key="param.0", source=values(0))
    target = empty()
    early = store.read(key="param.0", target=target)
    store.write(key="param.0", source=values(1)).wait()
    early.wait()
    assert torch.equal(target, values(0))
    assert torch.equal(read(store, "param.0"), values(1))


def test_when_all_is_waited_for_every_ticket_is_done(store: Any) -> None:
    tickets = [store.write(key=f"param.{seed}", source=values(seed)) for seed in range(3)]
    store.wait_all()
    for ticket in tickets:
        assert ticket.done()
        ticket.wait()
        ticket.wait()  # a second wait returns at once


def test_a_key_is_gone_once_it_is_discarded(store: Any) -> None:
    store.write(key="param.0", source=values(0)).wait()
    assert store.discard(key="param.0")
    assert not store.discard(key="param.0")
    store.write(key="param.0", source=values(1)).wait()
    assert torch.equal(read(store, "param.0"), values(1))


def test_owners_are_kept_until_the_transfer_is_over_and_no_longer(store: Any) -> None:
    class Owner:
        pass

    owner = Owner()
    alive = weakref.ref(owner)
    ticket = store.write(key="param.0", source=values(0), hold=owner)
    del owner
    ticket.wait()
    store.wait_all()  # the next call into a store drops what is over
    del ticket
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("store", IN_PARTS, indirect=True)
def test_parts_of_a_key_are_read_and_written(store: Any) -> None:
    store.reserve(key="param.0", nbytes=4 * NUMEL)
    content, half = values(0), NUMEL // 2
    store.write(key="param.0", source=content[half:], offset_bytes=4 * half).wait()
    store.write(key="param.0", source=content[:half], offset_bytes=0).wait()
    assert torch.equal(read(store, "param.0"), content)
    part = empty()[:half]
    store.read(key="param.0", target=part, offset_bytes=4 * half).wait()
    assert torch.equal(part, content[half:])


@pytest.mark.parametrize("store", IN_PARTS, indirect=True)
def test_bytes_that_a_key_does_not_have_are_refused(store: Any) -> None:
    store.reserve(key="param.0", nbytes=4 * NUMEL)
    with pytest.raises(ValueError, match=r"param\.0"):
        store.read(key="param.0", target=empty(), offset_bytes=4)
