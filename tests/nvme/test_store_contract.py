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
from memascend.errors import StoreError
from memascend.nvme.resident import ResidentStore
from memascend.nvme.store import TensorStore
from tests.support.nvme_memory import BOUNCE_BYTES, PageMemory
from tests.support.streaming_fakes import FakeStore
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
    "fake": (lambda folder: FakeStore(), True),
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
@pytest.mark.parametrize("offset_bytes", [4, 4 * NUMEL, 1 << 40])
def test_bytes_that_a_key_does_not_have_are_refused(store: Any, offset_bytes: int) -> None:
    store.reserve(key="param.0", nbytes=4 * NUMEL)
    with pytest.raises(ValueError, match=r"param\.0"):
        store.read(key="param.0", target=empty(), offset_bytes=offset_bytes)
    with pytest.raises(ValueError, match=r"param\.0"):
        store.write(key="param.0", source=values(0), offset_bytes=offset_bytes)


@pytest.mark.parametrize("store", IN_PARTS, indirect=True)
def test_a_key_that_is_not_there_is_an_error(store: Any) -> None:
    with pytest.raises(StoreError, match=r"param\.0"):
        store.read(key="param.0", target=empty()).wait()
    with pytest.raises(StoreError, match=r"param\.0"):
        store.write(key="param.0", source=values(0), offset_bytes=0).wait()


def transfers(store: Any, tensor: torch.Tensor, offset_bytes: int = 0) -> list[Callable[[], Any]]:
    """A read and a write of a tensor, not yet begun."""
    return [
        lambda: store.read(key="param.0", target=tensor, offset_bytes=offset_bytes),
        lambda: store.write(key="param.0", source=tensor, offset_bytes=offset_bytes or None),
    ]


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (torch.zeros(4, 3).t(), r"contiguous CPU tensors, got shape \(3, 4\)"),
        (torch.empty(4, device="meta"), "on meta"),
    ],
)
def test_a_tensor_that_no_store_can_use_is_refused(
    store: Any, tensor: torch.Tensor, told: str
) -> None:
    store.write(key="param.0", source=values(0)).wait()
    for start in transfers(store, tensor):
        with pytest.raises(ValueError, match=told):
            start()
    assert torch.equal(read(store, "param.0"), values(0))


def test_an_offset_before_the_key_is_refused(store: Any) -> None:
    store.write(key="param.0", source=values(0)).wait()
    for start in transfers(store, empty(), offset_bytes=-4):
        with pytest.raises(ValueError, match=r'bytes -4 to -4\+16384 .*"param\.0"'):
            start()


def test_memory_behind_a_tensor_may_be_used_as_far_as_it_is_said(store: Any) -> None:
    page = empty().view(torch.uint8)
    odd = page[:4097].copy_(values(0).view(torch.uint8)[:4097])
    store.write(key="param.0", source=odd, capacity_bytes=page.nbytes).wait()
    expected = odd.clone()
    page.fill_(1)
    store.read(key="param.0", target=odd, capacity_bytes=page.nbytes).wait()
    assert torch.equal(odd, expected)
