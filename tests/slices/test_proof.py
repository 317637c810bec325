"""Outputs that slices of one size cannot tell from the batch's are found by another size."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memascend.errors import ConfigError
from memascend.slices import proof
from tests.support.sliced_models import LENGTH, ROWS, Plain, assert_close, gradients, sliced

HIDDEN = 8


class Layer(nn.Module):
    """Returns a function of its states beside them."""

    def __init__(self, more: Callable[[torch.Tensor], torch.Tensor], probability: float) -> None:
        super().__init__()
        self.linear, self.more, self.probability = nn.Linear(HIDDEN, HIDDEN), more, probability

    def forward(self, states: torch.Tensor) -> Any:
        states = torch.tanh(self.linear(states))
        return nn.functional.dropout(states, self.probability), self.more(states)


class Model(nn.Module):
    """One checkpointed layer."""

    def __init__(
        self, more: Callable[[torch.Tensor], torch.Tensor], probability: float = 0
    ) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(50, HIDDEN), Layer(more, probability)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states, more = checkpoint(self.layer, self.embedding(ids), use_reentrant=False)
        weights = torch.linspace(0.5, 1.5, more.numel()).view(more.shape)
        return states.square().mean() + (more * weights).square().mean()


def trained(model: nn.Module, count: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradients; count 0: without slices."""
    torch.manual_seed(1)
    ids = torch.randint(50, (ROWS, LENGTH))
    running = sliced(model, slices_head=False).running((ids,), {}, lambda _: count)
    with running if count else contextlib.nullcontext():
        loss = model(ids)
    loss.backward()
    return loss.item(), gradients(model)


def alternating(states: torch.Tensor) -> torch.Tensor:
    return states.transpose(0, 1).flatten(0, 1)


def mean(states: torch.Tensor) -> torch.Tensor:
    return states.mean(0, keepdim=True)


@pytest.mark.parametrize(
    ("more", "count", "reason"),
    [
        (mean, ROWS, r"has the shape \(1, 16, 8\), where slices of 1 give \(2, 16, 8\)"),
        (lambda states: states.mean(0), ROWS, r"shape \(16, 8\), where slices of 1 give \(32, 8\)"),
        (
            lambda states: torch.cat([mean(states), mean(states.square())]),
            ROWS // 2,
            r"for 1 sequence\(s\) has the shape \(2, 16, 8\), where slices of 2 give \(1, 16, 8\)",
        ),
        (alternating, ROWS, "its output for a sequence depends on other sequences"),
        (alternating, ROWS // 2, "depends on other sequences"),
        (lambda states: states - mean(states), ROWS // 2, "depends on other sequences"),
    ],
)
def test_outputs_that_are_no_parts_of_the_batchs_keep_a_layer_whole(
    more: Any, count: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    compare_with_the_whole(more, count, caplog)
    assert re.search(reason, caplog.text), caplog.text


def compare_with_the_whole(more: Any, count: int, caplog: pytest.LogCaptureFixture) -> None:
    """Train the layer in slices and whole, keeping warnings of the first: losses and gradients."""
    torch.manual_seed(0)
    model = Model(more)
    loss, expected = trained(model, 0)
    with caplog.at_level(logging.WARNING):
        found_loss, found = trained(model, count)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert_close(found, expected)


def attention(states: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bsh,bth->bst", states, states)[:, None]


@pytest.mark.parametrize("count", [ROWS, 3])
@pytest.mark.parametrize(
    "more",
    [
        lambda states: states[..., :2].flatten(0, 1),  # router logits
        lambda states: states[..., :2],
        lambda states: attention(states)[:, 0],
        lambda states: states.argmax(-1, keepdim=True) + states * 0,
    ],
)
def test_outputs_of_tokens_and_sequences_are_put_together(
    more: Any, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    compare_with_the_whole(more, count, caplog)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("more", "reason"),
    [(alternating, "may have tokens in any order"), (lambda states: states[..., :2], "")],
)
def test_random_numbers_hide_values_and_not_shapes(
    more: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        trained(Model(more, 0.5), ROWS)
    assert bool(caplog.text) == bool(reason)
    assert reason in caplog.text


@pytest.mark.parametrize("more", [mean, alternating])
def test_a_layer_that_is_no_parts_is_not_computed_in_all_slices_again(
    more: Any, passes: list[Any]
) -> None:
    runs, ids = sliced(model := Model(more)), torch.randint(50, (ROWS, LENGTH))
    for numbers in ([*range(ROWS), 1], [0, 1]):
        passes.clear()
        with runs.running((ids,), {}, lambda rows: rows):
            model(ids)
        assert passes[-1] == ("forward", numbers)


def test_a_layer_is_proven_once() -> None:
    model, rows = Plain(reentrant=False), []
    linear = model.layers[0].linear2
    original = linear.forward
    linear.forward = lambda states: (rows.append(len(states)), original(states))[1]
    runs, ids = sliced(model), torch.randint(50, (ROWS, LENGTH))
    for count, expected in ((3, [2, 2, 2, 1, 2, 2, 2]), (3, [2, 2, 2]), (ROWS, [1] * ROWS)):
        rows.clear()
        with runs.running((ids,), {}, lambda _, count=count: count):
            model(ids)
        assert rows == expected


class Centres(nn.Module):
    """Takes the mean of its slice off, if it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + self.linear(states)

    def centred(self, states: torch.Tensor) -> torch.Tensor:
        return self(states - states.mean(0, keepdim=True))

    def chosen(self, choice: Any, states: torch.Tensor) -> torch.Tensor:
        return self.centred(states) if choice in (True, 2, 0.5, "centred") else self(states)

    def numbered(self, wide: Any, number: Any, states: torch.Tensor) -> torch.Tensor:
        return self.centred(states) if number else self(states)


def of_choice(choice: Any) -> Any:
    """Return a function that is made anew in each pass."""
    return lambda module, states: module.chosen(choice, states)


CALLS: list[list[Callable[[Any, torch.Tensor], Any]]] = [
    [
        lambda one, states: checkpoint(one.forward, states, use_reentrant=False),
        lambda one, states: checkpoint(one.centred, states, use_reentrant=False),
    ],
    *(
        [
            lambda one, states, i=i: checkpoint(one.chosen, i, states, use_reentrant=False)
            for i in choices
        ]
        for choices in ((0, 1, 2), (False, True), (None, True), (0.0, 0.5), ("plain", "centred"))
    ),
    [
        lambda one, states: checkpoint(one.numbered, 1, None, states, use_reentrant=False),
        lambda one, states: checkpoint(one.numbered, None, 1, states, use_reentrant=False),
    ],
    [
        lambda one, states, i=i: checkpoint(of_choice(i), one, states, use_reentrant=False)
        for i in (0, 2)
    ],
    [
        lambda one, states, i=i: checkpoint(
            functools.partial(one.chosen, i), states, use_reentrant=False
        )
        for i in (0, 2)
    ],
]


@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("count", [ROWS, 3])
def test_each_function_and_value_that_a_module_is_called_with_is_proven(
    calls: Any, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The last one depends on other sequences."""
    torch.manual_seed(0)
    model = Model(mean)
    model.layer = layer = Centres()

    def forward(ids: torch.Tensor) -> torch.Tensor:
        states = model.embedding(ids)
        for one in calls:
            states = one(layer, states)
        return states.square().mean()

    model.forward = forward
    loss, expected = trained(model, 0)
    with caplog.at_level(logging.WARNING):
        found_loss, found = trained(model, count)
    assert "its output for a sequence depends on other sequences" in caplog.text
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert_close(found, expected)


@pytest.mark.parametrize("worst", [None, 1])
def test_a_number_that_each_pass_changes_is_not_proven_for_ever(
    worst: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind some proofs it is taken for the worst of those before."""
    monkeypatch.setattr(proof, "PROOFS_MAX", 3)
    model, layer, rows = Model(mean), Centres(), []
    original = layer.linear.forward
    layer.linear.forward = lambda states: (rows.append(len(states)), original(states))[1]
    step = 0

    def forward(ids: torch.Tensor) -> torch.Tensor:
        choice = step == worst
        layer.chosen = types.MethodType(
            lambda one, _, states: one.centred(states) if choice else one(states), layer
        )
        return checkpoint(layer.chosen, step, model.embedding(ids), use_reentrant=False).sum()

    model.layer, model.forward = layer, forward
    runs, ids = sliced(model, slices_head=False), torch.randint(50, (ROWS, LENGTH))
    for step in range(6):
        rows.clear()
        with runs.running((ids,), {}, lambda _: 3):
            model(ids)
        proven = [1, *([2, 2, 2] if step != worst else [])] * (step < 3)
        whole = [ROWS] * (step == worst)
        if worst is not None and step >= 3:
            assert rows == [2, ROWS]
        else:
            assert rows == [2, 2, 2, *proven, *whole]


class TakesTable(nn.Module):
    """Adds the mean of a table, as long as it likes."""

    def forward(self, states: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return torch.tanh(states + table.mean(0))


class GivesTable(nn.Module):
    """Gives its layer a table."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(50, HIDDEN), TakesTable()
        self.table = torch.linspace(0, 1, length * 3 * HIDDEN).view(length, 3, HIDDEN)[:, :, None]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        table = self.table.mean(1)
        states = checkpoint(self.layer, self.embedding(ids), table, use_reentrant=False)
        return states.square().mean()


def test_a_table_as_long_as_a_later_batch_is_found(caplog: pytest.LogCaptureFixture) -> None:
    """Shapes alone take it for the batch's."""
    torch.manual_seed(0)
    model = GivesTable(ROWS)
    runs = sliced(model, slices_head=False)
    for rows, said in ((ROWS - 1, 0), (ROWS, 1)):
        ids = torch.randint(50, (rows, LENGTH))
        model(ids).backward()
        expected = gradients(model)
        with caplog.at_level(logging.WARNING), runs.running((ids,), {}, lambda rows: rows):
            loss = model(ids)
        loss.backward()
        assert caplog.text.count("its output for a sequence depends on other sequences") == said
        assert_close(gradients(model), expected)


class TakesLengths(nn.Module):
    """Hides tokens behind the length of each row, as a list has it."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__()
        self.linear, self.lengths = nn.Linear(HIDDEN, HIDDEN), lengths

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        kept = [torch.arange(LENGTH) < length for length in self.lengths[: len(states)]]
        return states + self.linear(states) * torch.stack(kept)[..., None]


@pytest.mark.parametrize("count", [ROWS, 3, 2])
def test_values_found_by_the_number_of_a_row_keep_a_layer_whole(
    count: int, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = Model(mean)
    model.layer = layer = TakesLengths([5, 7, 9, 11, 13, 16])
    model.forward = lambda ids: checkpoint(layer, model.embedding(ids), use_reentrant=False).sum()
    loss, expected = trained(model, 0)
    with caplog.at_level(logging.WARNING):
        found_loss, found = trained(model, count)
    assert "its output for a sequence depends on other sequences" in caplog.text
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert_close(found, expected)


def test_random_numbers_behind_a_pass_are_those_of_its_slices() -> None:
    model, ids = Plain(reentrant=False, probability=0.3), torch.randint(50, (ROWS, LENGTH))
    runs = sliced(model)
    found = []
    for _ in range(2):  # the first pass proves
        torch.manual_seed(0)
        with runs.running((ids,), {}, lambda _: 3):
            loss = model(ids)
        found.append((loss.item(), torch.rand(1).item()))
    assert found[0] == found[1]


def test_tokens_without_a_number_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """As those that a mask hides from all others."""
    model = Model(lambda states: states / (states > 0))
    with caplog.at_level(logging.WARNING):
        trained(model, ROWS)
    assert caplog.text == ""


class Counts(nn.Module):
    """Counts its calls and sequences, as routers count the tokens of their experts."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.linear, self.in_place, self.calls = nn.Linear(HIDDEN, HIDDEN), in_place, 0
        self.register_buffer("sequences", torch.zeros((), dtype=torch.long))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.in_place:
            self.sequences += len(states)
        else:
            self.sequences = self.sequences + len(states)
        return torch.tanh(self.linear(states))


@pytest.mark.parametrize("in_place", [True, False])
def test_a_proof_is_not_counted(in_place: bool) -> None:
    model, ids = Model(mean), torch.randint(50, (ROWS, LENGTH))
    model.layer = layer = Counts(in_place=in_place)
    model.forward = lambda ids: checkpoint(layer, model.embedding(ids), use_reentrant=False).sum()
    buffer = layer.sequences
    with sliced(model, slices_head=False).running((ids,), {}, lambda _: 3):
        loss = model(ids)
    assert (layer.calls, layer.sequences.item()) == (3, ROWS)
    loss.backward()
    assert (layer.calls, layer.sequences.item()) == (6, 2 * ROWS)
    assert (layer.sequences is buffer) == in_place


class AddsInAnyOrder(nn.Module):
    """Adds a little to its states, as layers do; of another token, if it `alternates`."""

    def __init__(self, *, alternates: bool) -> None:
        super().__init__()
        self.linear, self.alternates = nn.Linear(HIDDEN, HIDDEN), alternates

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        more = self.linear(states) / 20
        return states + (more.transpose(0, 1).reshape(states.shape) if self.alternates else more)


@pytest.mark.parametrize("alternates", [True, False])
def test_what_a_layer_adds_to_its_states_is_compared(
    alternates: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """All of the states would hide it in the roundings of bf16."""
    torch.manual_seed(0)
    model, ids = Model(mean), torch.randint(50, (ROWS, LENGTH))
    model.layer = layer = AddsInAnyOrder(alternates=alternates)
    model.forward = lambda ids: checkpoint(layer, model.embedding(ids), use_reentrant=False).sum()
    running = sliced(model.bfloat16(), slices_head=False).running((ids,), {}, lambda _: 3)
    with caplog.at_level(logging.WARNING), running:
        model(ids)
    assert ("depends on other sequences" in caplog.text) == alternates


def test_a_model_without_values_is_proven_by_shapes() -> None:
    model = Model(lambda states: states).to("meta")
    ids = torch.empty((ROWS, LENGTH), dtype=torch.long, device="meta")
    running = sliced(model, slices_head=False).running((ids,), {}, lambda _: 3)
    with running:
        states, _ = checkpoint(model.layer, model.embedding(ids), use_reentrant=False)
    assert states.shape == (ROWS, LENGTH, HIDDEN)


class Refuses(nn.Module):
    """Raises an error for so many sequences."""

    def __init__(self, rows: int, error: Exception) -> None:
        super().__init__()
        self.linear, self.rows, self.error = nn.Linear(HIDDEN, HIDDEN), rows, error

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if len(states) == self.rows:
            raise self.error
        return torch.tanh(self.linear(states))


def refusing(rows: int, error: Exception) -> tuple[Model, torch.Tensor]:
    model, ids = Model(mean), torch.randint(50, (ROWS, LENGTH))
    model.layer = layer = Refuses(rows, error)
    model.forward = lambda ids: checkpoint(layer, model.embedding(ids), use_reentrant=False).sum()
    return model, ids


def test_a_size_that_is_an_error_keeps_a_layer_whole(
    caplog: pytest.LogCaptureFixture, passes: list[Any]
) -> None:
    model, ids = refusing(1, RuntimeError("not one\nby itself"))
    model(ids).backward()
    expected = gradients(model)
    runs = sliced(model, slices_head=False)
    with caplog.at_level(logging.WARNING), runs.running((ids,), {}, lambda _: 3):
        loss = model(ids)
    assert (
        "whole batch at once: 1 sequence(s) are an error in it, RuntimeError not one"
        in (caplog.messages[0])
    )
    assert passes[-1] == ("forward", [0, 1, 2, 1])
    loss.backward()
    assert_close(gradients(model), expected)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ConfigError("a weight")])
def test_other_errors_in_a_proof_are_those_of_the_pass(error: Any) -> None:
    model, ids = refusing(1, error)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    with (
        pytest.raises(type(error)),
        sliced(model, slices_head=False).running((ids,), {}, lambda _: 3),
    ):
        model(ids)
    assert torch.equal(torch.get_rng_state(), state)
    model.layer.rows = 0
    model(ids).backward()


def test_a_proof_that_does_not_fit_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = refusing(2, torch.OutOfMemoryError("out of device memory"))
    runs = sliced(model, slices_head=False)
    for _ in range(2):  # and not tried again
        with caplog.at_level(logging.WARNING), runs.running((ids,), {}, lambda rows: rows):
            model(ids).backward()
    said = [one for one in caplog.messages if "head" not in one]
    assert len(said) == 1
    assert "Refuses is not proven to compute each sequence by itself" in said[0]


def test_memory_that_runs_out_for_one_sequence_of_several_is_an_error() -> None:
    model, ids = refusing(1, torch.OutOfMemoryError("out of device memory"))
    with (
        pytest.raises(torch.OutOfMemoryError),
        sliced(model, slices_head=False).running((ids,), {}, lambda _: 3),
    ):
        model(ids)
