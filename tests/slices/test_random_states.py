"""States of random numbers are kept once for all slices that begin with the same."""

from __future__ import annotations

import torch

from memascend.slices.random_states import RandomState
from tests.support.sliced_models import LENGTH, ROWS, Plain, sliced


def storages(states: list[RandomState]) -> int:
    return len({state._host.data_ptr() for state in states})


def states_of(model: Plain, *, count: int) -> list[RandomState]:
    """Those of the slices of the last layer."""
    ids = torch.randint(50, (ROWS, LENGTH))
    with sliced(model).running((ids,), {}, lambda _: count):
        loss = model(ids)
    found: list[RandomState] = []
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found += getattr(getattr(node, "call", None), "_random", [])
            nodes += [one for one, _ in node.next_functions]
    return found


def test_slices_without_random_numbers_keep_one_state_for_all_layers() -> None:
    """5056 bytes for each slice of each layer would be host memory that no plan has."""
    found = states_of(Plain(reentrant=False), count=ROWS)
    assert len(found) == 3 * ROWS  # of the embedding and two layers
    assert storages(found) == 1


def test_slices_with_random_numbers_keep_their_own() -> None:
    found = states_of(Plain(reentrant=False, probability=0.3), count=3)
    assert storages(found) == 2 * 3  # the embedding takes none


def test_a_state_brings_back_its_random_numbers_alone() -> None:
    before = RandomState([torch.empty(0)])
    first = torch.rand(3)
    after = RandomState([torch.empty(0)])
    assert not after.is_same(before)
    with before.restored():
        assert torch.equal(torch.rand(3), first)
    assert RandomState([torch.empty(0)]).is_same(after)
    before.restore()
    assert torch.equal(torch.rand(3), first)
