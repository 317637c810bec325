"""Sequences and documents that change each other's output keep a layer whole, also by a little."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memascend.slices.cut import CannotCut
from memascend.slices.influence import Two, check_influence
from tests.slices.test_documents import POSITIONS, TOKENS, block_mask
from tests.support.sliced_models import ROWS, assert_close, gradients, sliced

HIDDEN, LENGTH = 8, 256


class Layer(nn.Module):
    """Adds a part to its states, as layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return states + torch.tanh(self.linear(self.mixed(states)))

    def mixed(self, states: torch.Tensor) -> torch.Tensor:
        return states


class Centred(Layer):
    """Subtracts a running mean, of which each call is a tenth."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(HIDDEN))

    def mixed(self, states: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * states.detach().mean((0, 1))
        return states - self.mean


class Shifted(Layer):
    """Adds the token before, in all rows as if they were one."""

    def mixed(self, states: torch.Tensor) -> torch.Tensor:
        row = states.flatten(0, 1)
        return (row + nn.functional.pad(row[:-1], (0, 0, 1, 0))).view(states.shape)


class Limited(Layer):
    """Leaves the last tokens of a slice out, as experts of a limited capacity do."""

    def mixed(self, states: torch.Tensor) -> torch.Tensor:
        scores = states.sum(-1).flatten()
        few = scores.topk(scores.numel() // 50).indices
        return states * torch.ones_like(scores).index_fill(0, few, 0).view(*states.shape[:2], 1)


class Dropped(Centred):
    """With random numbers, too."""

    def mixed(self, states: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().mixed(states), 0.5)


class AlsoDropped(Layer):
    """With random numbers alone."""

    def mixed(self, states: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(states, 0.5)


class Model(nn.Module):
    """One checkpointed layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(50, HIDDEN), layer

    def forward(
        self, *, input_ids: torch.Tensor, position_ids: Any = None, attention_mask: Any = None
    ) -> torch.Tensor:
        states = self.embedding(input_ids)
        states = checkpoint(
            self.layer,
            states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_reentrant=False,
        )
        return states.square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [ROWS, 2])
@pytest.mark.parametrize(
    ("made", "depends"),
    [
        (Layer, False),
        (AlsoDropped, False),
        (Centred, True),
        (Shifted, True),
        (Limited, True),
        (Dropped, True),
    ],
)
def test_sequences_that_change_others_by_a_little_keep_a_layer_whole(
    made: type[Layer], depends: bool, count: int, dtype: torch.dtype, caplog: Any
) -> None:
    """Roundings of bf16 hid less than 16 of their steps from a slice of another size."""
    torch.manual_seed(0)
    model = Model(made()).to(dtype)
    with torch.no_grad():
        model.embedding.weight += 1
    ids = {"input_ids": torch.randint(50, (ROWS, LENGTH))}
    running = sliced(model, slices_head=False).running((), ids, lambda _: count)
    with caplog.at_level(logging.WARNING), running:
        model(**ids)
    assert ("depends on other" in caplog.text) == depends


class SmallShift(Layer):
    """Adds a part of the token before."""

    def mixed(self, states: torch.Tensor) -> torch.Tensor:
        return states + 0.5 * nn.functional.pad(states[:, :-1], (0, 0, 1, 0))


class SmallShiftBack(Layer):
    """Adds a part of the next token."""

    def mixed(self, states: torch.Tensor) -> torch.Tensor:
        return states + 0.5 * nn.functional.pad(states[:, 1:], (0, 0, 0, 1))


class Carries(Layer):
    """Has a state that goes from token to token."""

    def mixed(self, states: torch.Tensor) -> torch.Tensor:
        return states.cumsum(1) / 8


@pytest.mark.parametrize("count", [2, 6])
@pytest.mark.parametrize("made", [Layer, AlsoDropped, SmallShift, SmallShiftBack, Carries])
def test_documents_that_change_each_other_behind_the_mask_keep_a_layer_whole(
    made: type[Layer], count: int, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = Model(made())
    inputs = {
        "input_ids": torch.randint(50, (1, TOKENS)),
        "position_ids": POSITIONS,
        "attention_mask": block_mask(),
    }
    state = torch.get_rng_state()
    expected = model(**inputs)
    expected.backward()
    of_row = gradients(model)
    torch.set_rng_state(state)
    running = sliced(model, slices_head=False).running((), inputs, lambda _: count)
    with caplog.at_level(logging.WARNING), running:
        found = model(**inputs)
    found.backward()
    is_apart = made in (Layer, AlsoDropped)
    assert ("depends on other" in caplog.text) != is_apart
    if made is not AlsoDropped:
        assert found.item() == pytest.approx(expected.item(), rel=1e-6)
        assert_close(gradients(model), of_row)


class Same:
    """A cut of one slice that is all of its tensors."""

    def take(self, number: int, place: int, value: Any) -> Any:
        return value

    def part(self, number: int, output: torch.Tensor) -> torch.Tensor:
        return output


def halves(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor[:1], tensor[1:]


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (lambda states: (states * 2,), ""),
        (lambda states: (states / 0,), ""),  # infinity says nothing
        (lambda states: (None, states.argmax(-1)), ""),
        (lambda states: (states + 1e-2 * states.mean(0),), "depends on other sequences"),
        (lambda states: (states[states[:, 0, 0] > 0],), "the shape of its output"),
        (lambda states: (states if states[0, 0, 0] > 0 else None,), "the shape of its output"),
    ],
)
def test_outputs_are_compared_where_the_other_half_is_negated(compute: Any, reason: str) -> None:
    states, two = torch.rand(2, 4, 8) + 1, Two(Same(), halves, "sequence")  # type: ignore[arg-type]

    def run(cut: Any) -> Any:
        return compute(cut.take(0, 0, states))

    if not reason:
        check_influence(two, run(two.cut), [states], run, 2**-10)
    else:
        with pytest.raises(CannotCut, match=reason):
            check_influence(two, run(two.cut), [states], run, 2**-10)
    assert states.min() > 0
