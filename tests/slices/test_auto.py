"""Slices whose number is chosen: the fewest that fit, and smaller ones where memory ran out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from memascend.slices.auto import NO_LIMIT, AutoSlices, Need, StatedSlices
from memascend.slices.layers import Slicer
from memascend.slices.model import SlicedModel
from tests.support.sliced_models import LENGTH, ROWS, Plain, Weights, gradients, make

HELD, SEQUENCE, WEIGHTS, REDUCED = 1000, 10, 300, 50


class Memory:
    """A device on which a slice takes memory for its sequences, beside the rest of a pass."""

    def __init__(self, room_bytes: int) -> None:
        self.room = room_bytes
        self.begun = 0
        self.sequences = 1

    def held_bytes(self) -> int:
        return HELD

    def begin_peak(self) -> None:
        self.begun += 1

    def peak_bytes(self) -> int:
        return HELD + SEQUENCE * self.sequences

    def room_bytes(self) -> int:
        return self.room


class Failing(Weights):
    """Runs out of memory in some slice of a pass."""

    fails_in: tuple[str, int] | None = None

    @contextmanager
    def in_forward(self) -> Iterator[Callable[[int], None]]:
        with super().in_forward() as begin:
            yield lambda number: self._begin("forward", begin, number)

    @contextmanager
    def in_backward(self, count: int) -> Iterator[Callable[[int], None]]:
        with super().in_backward(count) as begin:
            yield lambda number: self._begin("backward", begin, number)

    def _begin(self, phase: str, begin: Callable[[int], None], number: int) -> None:
        if Failing.fails_in == (phase, number):
            Failing.fails_in = None
            raise torch.OutOfMemoryError("out of device memory")
        begin(number)


def same(number: int) -> int:
    return number


def chosen(room_bytes: int, least: Callable[[int], int] = same) -> AutoSlices:
    """The choice for a layer of which a slice of one sequence takes SEQUENCE bytes."""
    auto = AutoSlices(Memory(room_bytes), least)
    auto.begin()
    auto.slices_of(ROWS)
    one = (HELD, HELD + SEQUENCE)
    for is_backward in (False, True):
        auto.note_call([(HELD, HELD + WEIGHTS), *[one] * 4, (HELD, HELD + REDUCED)],
                       is_backward=is_backward)  # fmt: skip
    auto.begin()
    return auto


def test_the_first_slice_gathers_and_the_last_one_reduces() -> None:
    slices = [(500, 900), (800, 810), (805, 817), (805, 900)]
    need = Need.of(slices)
    assert need == Need(sequence_bytes=12, rest_bytes=900 - 12)
    assert [need.sequences(room) for room in (0, 900, 912, 936)] == [1, 1, 2, 4]
    assert Need.of([(500, 900), (800, 810)]).sequence_bytes == 10


@pytest.mark.parametrize(
    ("free", "slices"), [(0, 6), (1, 6), (2, 3), (3, 2), (4, 2), (5, 2), (6, 1), (99, 1)]
)
def test_the_fewest_slices_that_fit_are_chosen_and_told(
    free: int, slices: int, caplog: pytest.LogCaptureFixture
) -> None:
    rest = HELD + WEIGHTS - SEQUENCE
    with caplog.at_level(logging.INFO):
        auto = chosen(rest + free * SEQUENCE + 5)
    assert auto.slices_of(ROWS) == slices
    sequences = ROWS // slices
    (line,) = caplog.messages
    assert line == (
        f"memascend: slices of {sequences} sequence(s): one takes {sequences * SEQUENCE} B of "
        f"device memory, {free * SEQUENCE + 5} B are free. The same in every run: "
        f'{{"micro_batches": {{"sequences": {sequences}}}}}'
    )
    assert auto.measured is None


def test_all_ranks_have_the_number_of_the_rank_with_the_least_room() -> None:
    asked: list[int] = []

    def least(own: int) -> int:
        asked.append(own)
        return min(own, 2)

    auto = chosen(10 * HELD, least)
    assert asked == [ROWS]
    assert [auto.slices_of(batch) for batch in (1, 2, 3, 5, ROWS)] == [1, 1, 2, 3, 3]
    auto.begin()
    assert len(asked) == 1, "ranks agree once"


def test_a_rank_without_a_measure_has_the_number_of_the_others() -> None:
    auto = AutoSlices(Memory(0), lambda own: 3 if own == NO_LIMIT else 0)
    for _ in range(2):
        auto.begin()
        auto.note_call([(HELD, 2 * HELD)], is_backward=True)
    assert auto.slices_of(ROWS) == 2


def test_passes_are_measured_until_one_has_a_backward_pass_of_several_slices() -> None:
    auto = AutoSlices(Memory(10 * HELD), same)
    one = (HELD, HELD + SEQUENCE)
    for calls in ([], [([one], True)], [([one] * 3, False)], [([one] * 3, True)]):
        auto.begin()
        assert auto.measured is not None
        auto.slices_of(3)
        for slices, is_backward in calls:
            auto.note_call(slices, is_backward=is_backward)
    auto.begin()
    assert auto.measured is None
    assert auto.slices_of(3) == 1


def test_without_an_account_slices_have_one_sequence(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        auto = AutoSlices(None, same)
    for _ in range(3):
        auto.begin()
        assert (auto.measured, auto.slices_of(ROWS)) == (None, ROWS)
    (line,) = caplog.messages
    assert "slices of 1 sequence: this accelerator gives no account of its memory" in line


# -- in a model ------------------------------------------------------------------------------------


def model_of(auto: AutoSlices, model: torch.nn.Module) -> SlicedModel:
    return SlicedModel(model, Slicer(auto.watched(Failing)), slices_head=True)


def step(model: Any, auto: AutoSlices, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    auto.begin()
    torch.manual_seed(1)
    with model_of(auto, model).running((ids,), {}, auto.slices_of):
        loss = model(ids)
    loss.backward()
    return gradients(model)


def by_hand(model: Any, ids: torch.Tensor, sequences: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    running = SlicedModel(model, Slicer(Weights), slices_head=True).running
    with running((ids,), {}, lambda batch: -(-batch // sequences)):
        loss = model(ids)
    loss.backward()
    return gradients(model)


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], one) for name, one in expected.items()
    )


@pytest.fixture
def trained() -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    return Plain(reentrant=False, probability=0.3), torch.randint(50, (ROWS, LENGTH))


def test_the_chosen_number_has_the_bits_of_the_same_number_by_hand(trained: Any) -> None:
    model, ids = trained
    memory = Memory(HELD + 3 * SEQUENCE)
    auto = AutoSlices(memory, same)
    assert equal(step(model, auto, ids), by_hand(model, ids, 1))
    measured = memory.begun
    assert measured == 2 * 3 * ROWS  # forward and backward of the embedding and two layers
    for rows in (ROWS, 4, ROWS):  # a short batch has slices of as many sequences
        found = step(model, auto, ids[:rows])
        assert equal(found, by_hand(model, ids[:rows], 3))
        assert not equal(found, by_hand(model, ids[:rows], 1))
    assert memory.begun == measured


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_step_that_is_tried_again_has_the_bits_of_the_larger_number(
    trained: Any, phase: str
) -> None:
    model, ids = trained
    auto = AutoSlices(Memory(HELD + 3 * SEQUENCE), same)
    step(model, auto, ids)
    Failing.fails_in = (phase, 1)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        step(model, auto, ids)
    assert auto.shrunk_to == 1
    assert str(caught.value) == (
        "out of device memory\nmemascend: memory ran out in one of 2 slices of up to 3 "
        "sequence(s); the next pass has 6 of up to 1. fix: try this step again from its forward "
        'pass on, or set {"micro_batches": {"sequences": 1}} in the block'
    )
    model.zero_grad()
    assert equal(step(model, auto, ids), by_hand(model, ids, 1))
    assert auto.shrunk_to is None


def test_slices_of_one_sequence_cannot_be_halved(trained: Any) -> None:
    model, ids = trained
    auto = AutoSlices(Memory(10 * HELD), same)
    Failing.fails_in = ("backward", 2)
    with pytest.raises(torch.OutOfMemoryError, match="1 sequence, and there is no smaller one"):
        step(model, auto, ids)
    assert auto.shrunk_to is None
    model.zero_grad()
    step(model, auto, ids)  # which is measured: the failed one was not
    step(model, auto, ids)
    assert auto.slices_of(ROWS) == 1


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("sequences", [3, 1])
def test_an_error_names_smaller_slices_than_the_stated_ones(
    trained: Any, phase: str, sequences: int
) -> None:
    """The script may try the step again, and nothing of the failed one is left."""
    model, ids = trained
    stated = StatedSlices(lambda batch: -(-batch // sequences))
    running = SlicedModel(model, Slicer(stated.watched(Failing)), slices_head=True).running

    def step() -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        with running((ids,), {}, stated.slices_of):
            loss = model(ids)
        loss.backward()
        return gradients(model)

    Failing.fails_in = (phase, 1)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        step()
    expected = "there is no smaller one. fix: shorter sequences"
    if sequences > 1:
        expected = (
            "memory ran out in one of 2 slices of up to 3 sequence(s). fix: "
            '{"micro_batches": {"sequences": 1}} in the block'
        )
    assert str(caught.value).startswith("out of device memory\nmemascend: memory ran out in one of")
    assert str(caught.value).count(expected) == 1
    model.zero_grad()
    assert equal(step(), by_hand(model, ids, sequences))


def test_an_error_in_a_packed_row_names_slices_of_documents() -> None:
    model: Any = make("llama-untied")
    stated = StatedSlices(lambda batch: -(-batch // 4))
    running = SlicedModel(model, Slicer(stated.watched(Failing)), slices_head=True).running
    row = torch.randint(1, 50, (1, 64))
    inputs = {"input_ids": row, "position_ids": torch.arange(4).repeat(16)[None], "labels": row}
    Failing.fails_in = ("forward", 1)
    with (
        pytest.raises(torch.OutOfMemoryError) as caught,
        running((), inputs, stated.slices_of),
    ):
        model(**inputs)
    assert str(caught.value).endswith(
        "memory ran out in one of 4 slices of up to 4 sequence(s). fix: "
        '{"micro_batches": {"sequences": 2}} in the block'
    )
