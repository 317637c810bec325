"""Streams and copies on a device with streams, and on one that does all at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("deepspeed")

from memascend.deepspeed.parameters import device


def be(monkeypatch: pytest.MonkeyPatch, *, synchronous: bool) -> None:
    streams = ["default"]

    @contextmanager
    def stream(wanted: str) -> Iterator[None]:
        streams.append(wanted)
        yield
        streams.pop()

    accelerator = SimpleNamespace(
        is_synchronized_device=lambda: synchronous,
        current_device_name=lambda: "meta",
        current_stream=lambda: streams[-1],
        stream=stream,
    )
    monkeypatch.setattr(device, "get_accelerator", lambda: accelerator)


def test_a_device_with_streams_has_a_current_one_and_takes_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    be(monkeypatch, synchronous=False)
    with device.on_stream("other"):
        assert device.stream_here() == "other"
    assert device.stream_here() == "default"
    there = device.start_copy(torch.zeros(3))
    assert there is not None
    assert there.device.type == "meta"


def test_one_that_does_all_at_once_needs_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch, synchronous=True)
    assert device.stream_here() is None
    with device.on_stream(None):
        assert device.stream_here() is None
    assert device.start_copy(torch.zeros(3)) is None


def test_views_of_one_storage_share_memory_and_copies_do_not() -> None:
    whole = torch.zeros(4)
    assert device.shares_memory(whole[:1], whole[2:])
    assert not device.shares_memory(whole, whole.clone())


@pytest.mark.parametrize(("rank", "is_view"), [(0, True), (1, True), (2, False)])
def test_the_slice_of_a_rank_is_a_view_where_it_is_complete(rank: int, is_view: bool) -> None:
    """Of ten elements over three ranks, the last rank has two, and two of padding."""
    param = SimpleNamespace(data=torch.arange(10.0).view(2, 5), ds_zero_partition_rank=rank)
    slice_ = device.slice_of_rank(param, 4)
    assert slice_.numel() == 4
    assert device.shares_memory(slice_, param.data) == is_view
    if is_view:
        assert slice_.tolist() == [4.0 * rank + k for k in range(4)]


def test_a_shard_that_was_let_go_is_none() -> None:
    param = SimpleNamespace(ds_id=3, ds_tensor=torch.zeros(4))
    param.ds_tensor.ds_numel = 4
    assert device.device_shard(param).numel() == 4
    param.ds_tensor.ds_numel = 5
    with pytest.raises(AssertionError, match="parameter 3 has no shard to store"):
        device.device_shard(param)
