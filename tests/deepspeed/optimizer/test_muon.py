"""Muon's updates, matrix by matrix, beside those that DeepSpeed's function makes of whole ones."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from memascend.deepspeed.optimizer.muon import uses_muon
from memascend.errors import GradientGoneError
from memascend.plan.optimizers import MOMENTUM
from memascend.streaming.optimizer.step import Step
from tests.support.muon_rank import (
    BF16,
    COLUMNS,
    FP32,
    NUMEL,
    ROWS,
    Rank,
    expected,
    gradients,
    plain_updates,
    with_streams,
)
from tests.support.tiled_training import SIZES


@pytest.fixture(autouse=True)
def plain_update(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """No kernels are compiled."""
    return plain_updates(monkeypatch)


def test_momentum_lives_from_step_to_step_and_each_update_is_of_a_whole_matrix(
    plain_update: list[dict[str, Any]],
) -> None:
    rank = Rank()
    for step in range(3):
        for number, gradient in enumerate(gradients(step)):
            rank.put(number, gradient)
        rank.updates.update_all()
    for number, (update, momentum) in enumerate(expected(3)):
        for found, whole in zip(rank.read(number), (update, momentum), strict=True):
            assert torch.equal(found, whole.flatten().float())
        assert torch.equal(rank.norms[number].float(), update.double().norm().float())
    assert {call["shape"] for call in plain_update} == {(ROWS, COLUMNS)}
    assert plain_update[0]["ns_method"] == "standard"
    assert plain_update[0]["is_expert_group"] is False
    assert plain_update[0]["num_heads"] is None


def test_ranks_write_their_own_parts_and_zeros_behind_the_end() -> None:
    """77 elements on two ranks: the second has 38 and one of padding."""
    ranks = [Rank(number, 2) for number in range(2)]
    for number, gradient in enumerate(gradients(0)):
        for rank in ranks:
            rank.put(number, gradient)
    for rank, other in (ranks, ranks[::-1]):
        zeros = torch.zeros(rank.part_numel, dtype=BF16)
        rank.others = [([other.part(gradient)], [zeros]) for gradient in gradients(0)]
        rank.updates.update_all()
    for number, values in enumerate(expected(1)):
        for found, whole in zip(
            zip(*(rank.read(number) for rank in ranks), strict=True), values, strict=True
        ):
            assert torch.equal(torch.cat(found)[:NUMEL], whole.flatten().float())
            assert torch.cat(found)[NUMEL:].tolist() == [0.0]
        norm = torch.stack([rank.norms[number] for rank in ranks]).norm()
        assert torch.allclose(norm.float(), values[0].float().norm())


@pytest.mark.parametrize(
    ("room_bytes", "order"),
    [
        (4 * NUMEL, ["read", "update", "aside", "read", "back", "write", "update", "write"]),
        (4 * NUMEL - 1, ["read", "update", "write", "read", "update", "write"]),
    ],
)
def test_the_next_matrix_is_read_while_one_is_computed_if_the_room_has_both_values(
    monkeypatch: pytest.MonkeyPatch, room_bytes: int, order: list[str]
) -> None:
    from deepspeed.runtime.zero.muon import original_muon

    log: list[str] = []
    rank = Rank(device=with_streams(log))
    rank.on_device.room_bytes = room_bytes

    def logged(word: str, call: Any) -> Any:
        def log_and_call(*arguments: Any, **keywords: Any) -> Any:
            log.append(word)
            return call(*arguments, **keywords)

        return log_and_call

    stream = rank.updates._stream
    monkeypatch.setattr(stream, "_fill", logged("read", stream._fill))
    monkeypatch.setattr(stream, "write", logged("write", stream.write))
    monkeypatch.setattr(original_muon, "muon_update", logged("update", original_muon.muon_update))
    for number, gradient in enumerate(gradients(0)):
        rank.put(number, gradient)
    rank.updates.update_all()
    assert log == order
    assert rank.on_device.bytes_peak == (4 * NUMEL if "aside" in order else 0)
    for number, values in enumerate(expected(1)):
        for found, whole in zip(rank.read(number), values, strict=True):
            assert torch.equal(found, whole.flatten().float())


def test_a_loss_scale_is_taken_out_before_and_put_back_behind() -> None:
    scaled, plain = Rank(loss_scale=8.0), Rank()
    for number, gradient in enumerate(gradients(0)):
        scaled.put(number, gradient * 8)
        plain.put(number, gradient)
    scaled.updates.update_all()
    plain.updates.update_all()
    for number in range(2):
        (update, momentum), (other, same) = scaled.read(number), plain.read(number)
        assert torch.equal(update, other * 8)
        assert torch.equal(momentum, same)
        assert torch.equal(scaled.norms[number], plain.norms[number] * 8)


@pytest.mark.parametrize(
    ("accumulated", "communicated", "kept"),
    [(BF16, BF16, BF16), (BF16, FP32, BF16), (FP32, BF16, BF16), (FP32, FP32, FP32)],
)
def test_momentum_is_stored_in_a_dtype_that_loses_nothing(
    accumulated: torch.dtype, communicated: torch.dtype, kept: torch.dtype
) -> None:
    """DeepSpeed rounds it to both dtypes between two steps."""
    rank = Rank(accumulation_dtype=accumulated, reduction_dtype=communicated)
    assert rank.updates.momentum_dtype == kept


def test_only_sub_groups_of_matrices_are_updated() -> None:
    for flags, expectation in (((), False), ((False, False), False), ((True, True), True)):
        assert uses_muon([SimpleNamespace(use_muon=flag) for flag in flags]) is expectation
    assert not uses_muon([SimpleNamespace()])
    rank = Rank()
    rank.updates.update_all()
    others = [name for name, _ in itertools.islice(SIZES.items(), 3) if name != rank.group.name]
    assert all(not rank.training.groups.group(name).states for name in others)


# -- applied as they are made ----------------------------------------------------------------------


def stepped(rank: Rank, seeds: list[tuple[int, ...]], number: int) -> torch.Tensor:
    """The weights after steps with these matrices' gradients, made of whole tensors in memory.

    A matrix without a gradient steps by its last update, as CPU offload.
    """
    begin = number * NUMEL
    weight = rank.training.initial[rank.group.name].narrow(0, begin, NUMEL).clone()
    momentum, update = torch.zeros(NUMEL, dtype=BF16), torch.zeros(NUMEL, dtype=BF16)
    for seed, numbers in enumerate(seeds):
        gradient = gradients(seed)[number].flatten() if number in numbers else update
        momentum.lerp_(gradient, 0.5)
        update = gradient / (momentum.norm() + 1)
        weight.mul_(1 - 0.1 * 0.5)
        weight.add_(update.float(), alpha=-0.1)
    return weight


def test_weights_take_an_update_as_it_is_made_and_nothing_of_it_is_written() -> None:
    rank = Rank(applies=True)
    rank.step(0, 0, 1)  # before it there is no momentum: its update is written
    assert rank.is_stored(0)
    before = rank.weights(0)
    for seed in (1, 2):
        rank.step(seed, 0, 1)
        assert not rank.is_stored(0)
    assert not torch.equal(rank.weights(0), before)
    for number in range(2):
        momentum = torch.empty(NUMEL)
        rank.training.groups.get(rank.group.name, number * NUMEL, momentum, state=MOMENTUM)
        assert torch.equal(momentum, expected(3)[number][1].flatten().float())
    # The walk of the first step was not made.
    twin = rank.training.initial[rank.group.name].narrow(0, 0, NUMEL).clone()
    for step in (2, 3):
        twin.mul_(1 - 0.1 * 0.5)
        twin.add_(expected(step)[0][0].flatten().float(), alpha=-0.1)
    assert torch.equal(rank.weights(0), twin)
    stored = torch.empty(NUMEL, dtype=BF16)
    rank.store.read(key="param", target=stored).wait()
    assert torch.equal(stored, twin.bfloat16())


def without_first_step(rank: Rank) -> Rank:
    """Give it a momentum of zeros, as if it had made a step."""
    rank.training.groups.settle()
    rank.group.fills.clear()
    return rank


def test_a_matrix_without_a_gradient_steps_by_its_last_update_again() -> None:
    rank, seeds = without_first_step(Rank(applies=True)), [(0, 1), (0, 1), (0,), (0,), (0, 1), (0,)]
    stored = []
    for seed, numbers in enumerate(seeds):
        rank.step(seed, *numbers)
        stored.append(rank.is_stored(1))
    for number in range(2):
        assert torch.equal(rank.weights(number), stepped(rank, seeds, number))
    # Made again once; then its updates are stored.
    assert stored == [False, False, True, True, True, True]
    assert not rank.is_stored(0)


def test_a_step_that_is_skipped_moves_momentum_and_no_weight() -> None:
    rank = without_first_step(Rank(applies=True))
    before = rank.weights(0)
    rank.step(0, 0, 1, is_skipped=True)
    assert torch.equal(rank.weights(0), before)
    momentum = torch.empty(NUMEL)
    rank.training.groups.get(rank.group.name, 0, momentum, state=MOMENTUM)
    assert torch.equal(momentum, expected(1)[0][1].flatten().float())


def test_a_gradient_is_read_after_a_step_if_one_was_read_before() -> None:
    rank, found = without_first_step(Rank(applies=True)), torch.empty(NUMEL)
    rank.step(0, 0, 1)
    with pytest.raises(GradientGoneError, match="fused"):
        rank.training.gradient_stream.get(rank.group.name, 0, found)
    rank.updates.note_look()
    rank.step(1, 0, 1)
    assert torch.equal(rank.read(0)[0], expected(2)[0][0].flatten().float())
    assert torch.equal(rank.weights(0), stepped(rank, [(0, 1), (0, 1)], 0)), "applied all the same"


def test_with_clipping_from_some_step_on_the_last_update_is_made_again() -> None:
    rank = without_first_step(Rank(applies=True))
    rank.step(0, 0, 1)
    rank.upstream.norm_max = 1.0
    rank.step(1, 0)
    update, _ = rank.read(1)
    momentum, gradient = torch.zeros(NUMEL, dtype=BF16), gradients(0)[1].flatten()
    for _ in range(2):
        momentum.lerp_(gradient, 0.5)
        gradient = gradient / (momentum.norm() + 1)
    assert torch.equal(update, gradient.float())


def test_after_a_torn_step_a_gradient_stands_for_the_update_that_is_lost() -> None:
    rank, torn = without_first_step(Rank(applies=True)), Step()
    rank.step(0, 0, 1)
    rank.updates.drop(Step(), "")
    assert not rank.is_stored(0)
    torn.note_updates()
    rank.updates.drop(torn, "")
    assert rank.is_stored(0)
    assert torch.equal(rank.read(0)[0], gradients(0)[0].flatten().float())


def test_ranks_agree_on_what_is_applied_and_what_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another rank has no room, has read a gradient, or has a part of a matrix that is stale."""
    told: list[list[bool]] = []
    answers: list[list[bool]] = []

    def any_rank(flags: list[bool]) -> list[bool]:
        told.append(flags)
        other = answers.pop(0) if answers else [False] * len(flags)
        return [one or two for one, two in zip(flags, other, strict=True)]

    rank = without_first_step(Rank(applies=True))
    monkeypatch.setattr(rank.updates, "_any_rank", any_rank)
    rank.step(0, 0, 1)
    assert told == [[False, False, False, False]]  # reads, refuses, stale 0, stale 1
    answers.append([True, True, False, False])
    rank.step(1, 0, 1)
    assert rank.is_stored(0)
    assert not any("early" in key for key in rank.store.keys())  # noqa: SIM118  a store is no dict
    rank.step(2, 0)
    assert told[2] == [True, True, False, False]


def test_with_fp16_or_clipping_no_rank_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for changes in ({"norm_max": 1.0}, {"dtype": torch.float16}, {"loss_scale": 2.0}):
        rank = Rank(applies=True, **changes)
        monkeypatch.setattr(rank.updates, "_any_rank", None)
        rank.step(0, 0, 1)
        assert rank.is_stored(0)
