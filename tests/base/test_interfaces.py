"""The surface of stores and host memory; tests/nvme and tests/memory try it on every kind."""

from __future__ import annotations

import pytest
import torch

from memascend.base.interfaces import HostMemory, TensorIO, TensorRequest
from tests.support.streaming_fakes import FakeMemory, FakeStore


def test_the_rest_of_a_transfer_is_its_last_bytes_and_holds_all_of_it() -> None:
    tensor, hold = torch.arange(4, dtype=torch.int16), object()
    rest = TensorRequest("a", tensor, 10, hold, 4096).without(2)
    assert rest.data.view(torch.int16).tolist() == [1, 2, 3]
    assert (rest.key, rest.begin, rest.nbytes, rest.capacity_bytes) == ("a", 12, 6, 0)
    assert rest.hold == (tensor, hold)


def test_a_whole_key_begins_at_its_first_byte() -> None:
    assert TensorRequest("a", torch.empty(4), None, None, 0).begin == 0


@pytest.mark.parametrize(("made", "kind"), [(FakeStore, TensorIO), (FakeMemory, HostMemory)])
def test_what_one_kind_leaves_out_is_seen_where_it_is_made(made: type, kind: type) -> None:
    for name in kind.__abstractmethods__:  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match=name):
            type("Less", (made,), {name: getattr(kind, name)})()
