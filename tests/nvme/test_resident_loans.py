"""Loans of the resident cache: its memory is read by others, and nothing changes it meanwhile."""

from __future__ import annotations

import pytest
import torch

from memascend.nvme.resident import ResidentStore
from tests.support.resident_stores import content, open_resident, pattern
from tests.support.streaming_hosts import PAGE_BYTES, HostTensors


def lent(store: ResidentStore, key: str) -> torch.Tensor:
    assert store.lends(key=key, dtype=torch.uint8)
    return store.lend(key=key, dtype=torch.uint8)


def test_a_lent_key_is_its_memory_and_counts_as_read() -> None:
    memory = HostTensors()
    store = open_resident(memory=memory, one=2 * PAGE_BYTES)
    source = torch.randn(1000).bfloat16()
    store.write(key="one.a", source=source).wait()
    first = store.lend(key="one.a", dtype=torch.bfloat16)
    assert torch.equal(first, source)
    assert store.lend(key="one.a", dtype=torch.bfloat16).data_ptr() == first.data_ptr()
    store.take_back(key="one.a")
    store.write(key="one.a", source=source * 2).wait()
    assert torch.equal(first, source * 2)
    assert store.stats()["resident_bytes_read.one"] == 2 * 2000
    assert memory.nbytes == {"resident cache": 2 * PAGE_BYTES}


def test_what_is_not_all_in_memory_or_not_aligned_is_not_lent() -> None:
    store = open_resident(one=2 * PAGE_BYTES)
    store.write(key="third.a", source=pattern(10)).wait()
    store.write(key="one.a", source=pattern(6)).wait()
    store.write(key="one.b", source=pattern(8)).wait()
    store.write(key="one.large", source=pattern(2 * PAGE_BYTES)).wait()
    for key, dtype, lends in (
        ("one.a", torch.bfloat16, True),
        ("one.b", torch.bfloat16, True),
        ("one.b", torch.float32, False),  # behind six bytes
        ("one.large", torch.uint8, False),
        ("third.a", torch.uint8, False),
        ("one.unknown", torch.uint8, False),
    ):
        assert store.lends(key=key, dtype=dtype) == lends, key


def test_nothing_changes_a_key_while_it_is_lent() -> None:
    memory = HostTensors()
    store = open_resident(one=2 * PAGE_BYTES)
    store.write(key="one.a", source=pattern(2 * PAGE_BYTES)).wait()
    store.write(key="one.b", source=pattern(3 * PAGE_BYTES, 2)).wait()
    store.write(key="early.one.a", source=pattern(2 * PAGE_BYTES, 3)).wait()
    view = lent(store, "one.a")
    changes = (
        lambda: store.write(key="one.a", source=pattern(2 * PAGE_BYTES, 3)),
        lambda: store.write(key="one.a", source=pattern(1, 3), offset_bytes=5),
        lambda: store.reserve(key="one.a", nbytes=PAGE_BYTES),
        lambda: store.discard(key="one.a"),
        lambda: store.take_over(key="one.a", other="early.one.a"),
        lambda: store.give_memory_to(key="one.b", nbytes=3 * PAGE_BYTES, over="one.a"),
        store.revoke,
        lambda: store.grant({"one": PAGE_BYTES}, memory=memory, component="resident cache"),
    )
    for change in changes:
        with pytest.raises(ValueError, match=r"one\.a.* is lent"):
            change()
    store.reserve(key="one.a", nbytes=2 * PAGE_BYTES)  # changes nothing
    assert torch.equal(view, pattern(2 * PAGE_BYTES))
    assert torch.equal(content(store, "one.b"), pattern(3 * PAGE_BYTES, 2))
    store.take_back(key="one.a")
    changes[0]()
    assert torch.equal(content(store, "one.a"), pattern(2 * PAGE_BYTES, 3))
    store.revoke()
    assert torch.equal(content(store, "one.a"), pattern(2 * PAGE_BYTES, 3))


def test_a_closed_store_leaves_what_is_lent_mapped() -> None:
    store = open_resident(one=PAGE_BYTES)
    store.write(key="one.a", source=pattern(100)).wait()
    view = lent(store, "one.a")
    store.close()
    assert torch.equal(view, pattern(100))
    store.take_back(key="one.a")
