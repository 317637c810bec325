"""Every element of a sub-group has a gradient: arithmetic of gaps, and what outlives a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("deepspeed")

import itertools

from memascend.deepspeed.stock.optimizer_swapper import (
    GradientMemory,
    buffers_needed,
    gradient_gaps,
)

NUMEL_MAX = 60
runs = st.lists(st.tuples(st.integers(0, NUMEL_MAX), st.integers(0, 20)), max_size=8)


# -- gaps ----------------------------------------------------------------------------------------


@given(covered=runs, numel=st.integers(0, NUMEL_MAX))
def test_gaps_are_exactly_what_no_run_covers(covered: list[tuple[int, int]], numel: int) -> None:
    touched = {index for offset, length in covered for index in range(offset, offset + length)}
    in_gaps = [
        index
        for offset, length in gradient_gaps(covered, numel)
        for index in range(offset, offset + length)
    ]
    assert sorted(in_gaps) == in_gaps
    # Beyond the sub-group there is nothing to fill.
    assert [index for index in in_gaps if index < numel] == [
        index for index in range(numel) if index not in touched
    ]


@given(covered=runs, numel=st.integers(1, NUMEL_MAX))
def test_gaps_are_never_empty_and_never_overlap(covered: list[tuple[int, int]], numel: int) -> None:
    within = [(offset, min(length, numel - offset)) for offset, length in covered if offset < numel]
    gaps = gradient_gaps(within, numel)
    assert all(length > 0 for _, length in gaps)
    for (offset, length), (following, _) in itertools.pairwise(gaps):
        assert offset + length <= following
    assert not gaps or gaps[-1][0] + gaps[-1][1] <= numel


# -- gradients that outlive a step ---------------------------------------------------------------


def swap_info(numel: int, swapped: dict[int, int] | None = None) -> Any:
    """What the memory uses of DeepSpeed's OptimizerStateSwapInfo."""
    gradients = {
        offset: SimpleNamespace(offset=offset, length=length)
        for offset, length in (swapped or {}).items()
    }
    return SimpleNamespace(swapped_gradients=gradients, unswapped_gradients={}, numel=lambda: numel)


def coverage(info: Any) -> list[int]:
    """How many gradients stand for each element."""
    counts = [0] * info.numel()
    for gradient in info.swapped_gradients.values():
        for index in range(gradient.offset, gradient.offset + gradient.length):
            counts[index] += 1
    for offset, tensor in info.unswapped_gradients.items():
        for index in range(offset, offset + tensor.numel()):
            counts[index] += 1
    return counts


def read_back(info: Any, stored: dict[int, torch.Tensor]) -> torch.Tensor:
    """The flat gradient as upstream assembles it from the store and from memory."""
    flat = torch.full((info.numel(),), float("nan"))
    for offset, tensor in (stored | info.unswapped_gradients).items():
        flat.narrow(0, offset, tensor.numel()).copy_(tensor)
    return flat


def test_what_never_arrived_reads_as_zero_and_takes_no_memory() -> None:
    info = swap_info(1_000_000, {10: 5})
    GradientMemory().complete(info)
    assert read_back(info, {10: torch.ones(5)}).sum() == 5
    assert all(t.untyped_storage().nbytes() == 4 for t in info.unswapped_gradients.values())


def test_completing_twice_covers_every_element_once() -> None:
    info, memory = swap_info(50, {10: 5}), GradientMemory()
    for _ in range(3):
        memory.complete(info)
        assert coverage(info) == [1] * 50


def test_a_gradient_that_arrives_replaces_the_gap_it_covers() -> None:
    info, memory = swap_info(50), GradientMemory()
    memory.complete(info)
    memory.forget(info, [(20, 5)])
    info.unswapped_gradients[20] = torch.ones(5)
    memory.complete(info)
    assert coverage(info) == [1] * 50
    assert read_back(info, {}).tolist() == [0.0] * 20 + [1.0] * 5 + [0.0] * 25


def test_a_small_gradient_is_kept_as_the_step_left_it() -> None:
    info, memory = swap_info(10), GradientMemory()
    info.unswapped_gradients[4] = torch.ones(2)
    memory.complete(info)
    stepped = read_back(info, {}) * 0.5  # unscaled and clipped
    memory.keep_small(info, stepped)
    info.unswapped_gradients.clear()  # as upstream does after a step
    memory.complete(info)
    assert read_back(info, {}).tolist() == [0.0] * 4 + [0.5, 0.5] + [0.0] * 4


def test_a_stored_gradient_is_brought_to_where_the_steps_left_it() -> None:
    info, memory = swap_info(6, {0: 4}), GradientMemory()
    stored = {0: torch.ones(4)}
    memory.complete(info)
    for factor in (0.5, 1.0, torch.tensor(0.25)):
        memory.note_factor(info, factor)
    gradient = read_back(info, stored)
    memory.apply_factors(info, gradient)
    assert gradient.tolist() == [0.125] * 4 + [0.0] * 2


def test_a_gradient_that_arrives_anew_has_no_factors() -> None:
    info, memory = swap_info(8, {0: 4, 4: 4}), GradientMemory()
    memory.note_factor(info, 0.5)
    memory.forget(info, [(4, 4)])
    gradient = torch.ones(8)
    memory.apply_factors(info, gradient)
    assert gradient.tolist() == [0.5] * 4 + [1.0] * 4


class Model:
    """CPU offload's one buffer: an element keeps what the last step left there, zero at first."""

    def __init__(self, numel: int) -> None:
        self.buffer = torch.zeros(numel)

    def step(self, arriving: dict[int, torch.Tensor], factor: float) -> torch.Tensor:
        for offset, tensor in arriving.items():
            self.buffer.narrow(0, offset, tensor.numel()).copy_(tensor)
        seen = self.buffer.clone()
        self.buffer.mul_(factor)
        return seen


LENGTHS = (7, 1, 30, 12, 3)  # of the tensors in one sub-group; the longer ones go to the store
STORED_NUMEL_MIN = 10
steps = st.lists(
    st.tuples(st.sets(st.sampled_from(range(len(LENGTHS)))), st.sampled_from([1.0, 0.5, 0.25])),
    min_size=1,
    max_size=8,
)


@given(steps=steps)
def test_any_sequence_of_steps_reads_as_under_cpu_offload(
    steps: list[tuple[set[int], float]],
) -> None:
    offsets = [sum(LENGTHS[:index]) for index in range(len(LENGTHS))]
    info, memory = swap_info(sum(LENGTHS)), GradientMemory()
    model, stored = Model(sum(LENGTHS)), {}
    for number, (present, factor) in enumerate(steps):
        arriving = {
            offsets[index]: torch.full((LENGTHS[index],), float(number + 1 + index))
            for index in present
        }
        memory.forget(info, [(offset, t.numel()) for offset, t in arriving.items()])
        for offset, tensor in arriving.items():
            if tensor.numel() >= STORED_NUMEL_MIN:
                stored[offset] = tensor
                info.swapped_gradients[offset] = SimpleNamespace(
                    offset=offset, length=tensor.numel()
                )
            else:
                info.unswapped_gradients[offset] = tensor
        memory.complete(info)
        assert coverage(info) == [1] * info.numel()
        gradient = read_back(info, stored)
        memory.apply_factors(info, gradient)
        assert gradient.tolist() == model.step(arriving, factor).tolist()
        gradient.mul_(factor)
        memory.note_factor(info, factor)
        memory.keep_small(info, gradient)
        info.unswapped_gradients.clear()


# -- buffers -------------------------------------------------------------------------------------


def optimizer(name: str, **group: Any) -> Any:
    return type(name, (), {"param_groups": [group]})()


@pytest.mark.parametrize(
    ("name", "group", "count"),
    [
        ("DeepSpeedCPUAdam", {}, 4),
        ("AdamW", {"amsgrad": True}, 5),
        ("AdamW", {"amsgrad": False}, 4),
        ("DeepSpeedCPUAdagrad", {}, 3),
        ("DeepSpeedCPULion", {}, 4),  # the second state is never used, but it is there
        ("FusedLion", {}, 3),
        ("SGD", {}, 2),
        ("SGD", {"momentum": 0.9}, 3),
        ("Unheard", {}, 4),
    ],
)
def test_buffers_hold_weights_states_and_gradient(
    name: str, group: dict[str, Any], count: int
) -> None:
    assert buffers_needed(optimizer(name, **group), pipelined=False) == count
    assert buffers_needed(optimizer(name, **group), pipelined=True) == 3 * count
