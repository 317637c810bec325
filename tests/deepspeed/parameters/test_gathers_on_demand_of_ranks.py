"""Gathers of several ranks: alike on each, whatever has arrived and is waited for first."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

pytest.importorskip("deepspeed")

from memascend.deepspeed.parameters.gather import wrap_fetch
from tests.support.gather_bench import ABSENT, FLYING, THERE, TRACELESS, Bench
from tests.support.swapped_parameters import PATIENCE_S


def test_with_several_ranks_arrival_begins_nothing() -> None:
    bench = Bench(is_alone=False)
    bench.prefetch(0, 1, 2)
    bench.gather(0, 1)
    bench.finish_read(0)
    bench.finish_read(1)
    bench.gather(2)
    assert bench.gathered == []


def test_a_blocking_gather_of_several_ranks_begins_what_it_needs() -> None:
    bench = Bench(is_alone=False)
    bench.gather(0)
    bench.gather(1)
    bench.params[1].all_gather(param_list=bench.params[1:2])
    assert bench.gathered == [[1]]
    assert bench.statuses() == [FLYING, THERE, ABSENT]


def fetch(bench: Bench, module: list[int], ahead: list[int], chance: random.Random) -> None:
    """As DeepSpeed: gather what the module needs, wait for it in any order, and gather ahead."""

    def original(*_: object) -> None:
        absent = [index for index in module if bench.params[index].ds_status is ABSENT]
        if absent:
            bench.gather(*chance.sample(absent, len(absent)))
        for index in chance.sample(module, len(module)):
            if index in bench.registry:
                bench.registry.pop(index).wait()
            assert bench.is_whole(index)
        if ahead:
            bench.prefetch(*ahead)
            bench.gather(*chance.sample(ahead, len(ahead)))

    wrap_fetch(original)(TRACELESS, bench.module(*module), True, False)


@hypothesis.given(
    st.lists(st.lists(st.integers(0, 7), min_size=1, unique=True), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_ranks_begin_alike_whatever_has_arrived_and_in_whatever_order_they_wait(
    modules: list[list[int]], chance: random.Random
) -> None:
    ranks = [Bench(is_alone=False, count=8) for _ in range(2)]
    for place, module in enumerate(modules):
        absent = [i for i in range(8) if ranks[0].params[i].ds_status is ABSENT]
        ahead = [i for i in absent if i not in module and chance.random() < 0.5]
        for bench in ranks:
            fetch(bench, module, ahead, chance)
            for index in chance.sample(range(8), 2):
                bench.finish_read(index)
            for index in module:
                bench.params[index].ds_status = ABSENT  # released
        assert [sorted(ids) for ids in ranks[0].gathered] == [
            sorted(ids) for ids in ranks[1].gathered
        ], place
        assert ranks[0].statuses() == ranks[1].statuses()


def test_all_that_a_module_needs_is_gathered_as_one_and_nothing_else() -> None:
    bench = Bench(is_alone=False, count=4)
    chance = random.Random(0)
    fetch(bench, [0], [1, 2], chance)
    assert bench.gathered == [[0]]
    fetch(bench, [2, 3], [], chance)
    assert [sorted(ids) for ids in bench.gathered] == [[0], [2, 3]]
    assert bench.pending() == ["param.1"]


class Attention(torch.nn.Module):
    """Has a parameter of its own, one of a child, and one of another module."""

    def __init__(self, own: Any, inner: Any, external: Any) -> None:
        super().__init__()
        self.inner = torch.nn.Module()
        self._own, self._inner, self._external = own, inner, external

    def named_parameters(self, prefix: str = "", recurse: bool = True, **_: Any) -> Any:
        yield "own", self._own
        if recurse:
            yield "inner", self._inner

    def ds_external_parameters(self) -> Any:
        yield "external", self._external


@pytest.mark.parametrize("is_leaf", [False, True])
def test_a_module_needs_external_parameters_and_a_leaf_those_of_its_children(is_leaf: bool) -> None:
    bench = Bench(is_alone=False, count=4)
    bench.gather(3, 2, 1, 0)
    module = Attention(*bench.params[:3])
    fetch = wrap_fetch(lambda *_: bench.registry.pop(0).wait())
    fetch(TRACELESS, module, False, is_leaf)
    assert sorted(bench.gathered[0]) == ([0, 1, 2] if is_leaf else [0, 2])


def test_a_thread_that_fetches_does_not_begin_what_another_ones_module_needs() -> None:
    bench = Bench(is_alone=False)
    bench.gather(0, 1)
    both = threading.Barrier(2, timeout=PATIENCE_S)

    def fetch_one(index: int) -> None:
        def original(*_: object) -> None:
            both.wait()
            with bench.lock:
                before = len(bench.gathered)
                bench.registry.pop(index).wait()
                assert bench.gathered[before:] == [[index]]

        wrap_fetch(original)(TRACELESS, bench.module(index), True, False)

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(fetch_one, (0, 1))] == [None, None]


@pytest.mark.parametrize("is_alone", [True, False])
def test_what_deepspeed_lets_go_unused_is_never_gathered(is_alone: bool) -> None:
    """It waits for one after the other, in the order of a set that each rank has its own of."""
    bench = Bench(is_alone=is_alone)
    bench.prefetch(0, 1, 2)
    bench.gather(0, 1, 2)
    bench.wait(1)
    for index in (2, 0):
        bench.let_go(index)
    assert bench.gathered == [[1]]
    assert bench.statuses() == [ABSENT, THERE, ABSENT]
    bench.gather(0, 2)
    bench.wait(0, 2)
    assert all(map(bench.is_whole, range(3)))
