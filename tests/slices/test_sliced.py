"""Slices are recomputed as they were computed."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from tests.support.sliced_models import (
    LENGTH,
    ROWS,
    Plain,
    assert_as_whole,
    assert_close,
    batch,
    gradients,
    make,
    run,
    sliced,
)


def test_backward_has_the_random_numbers_of_forward() -> None:
    """The slope along a gradient is its square, if both saw the same dropout."""
    torch.manual_seed(0)
    model = Plain(reentrant=False, probability=0.3).double()
    ids = torch.randint(50, (ROWS, LENGTH))

    def loss() -> torch.Tensor:
        torch.manual_seed(1)
        with sliced(model).running((ids,), {}, lambda _: 3):
            return model(ids)

    value = loss()
    value.backward()
    found = gradients(model)
    step = 1e-6
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name in found:
                param += step * found[name]
    slope = (loss() - value).item() / step
    assert slope == pytest.approx(
        sum(one.square().sum().item() for one in found.values()), rel=1e-3
    )


def test_random_numbers_behind_a_backward_pass_are_those_of_no_recomputation() -> None:
    model = Plain(reentrant=False, probability=0.3)
    ids = torch.randint(50, (ROWS, LENGTH))
    with sliced(model).running((ids,), {}, lambda _: 3):
        loss = model(ids)
    state = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_autocast_of_forward_is_that_of_backward() -> None:
    torch.manual_seed(0)
    model = make("llama-untied")
    inputs = batch(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**inputs).loss
    loss.backward()
    expected = gradients(model)
    with torch.autocast("cpu", torch.bfloat16), sliced(model).running((), inputs, lambda _: 3):
        loss = model(**inputs).loss
    loss.backward()
    assert_close(gradients(model), expected, rel=2e-2)


def test_a_graph_that_is_dropped_keeps_nothing() -> None:
    model = make("llama-untied")
    inputs = batch(model)
    with sliced(model).running((), inputs, lambda _: 3):
        output = model(**inputs)
    node = weakref.ref(output.loss)
    del output
    assert node() is None
    assert_close(run(model, inputs, 3)[1], run(model, inputs, 0)[1])


def test_a_graph_is_differentiated_twice_if_it_is_retained() -> None:
    model = make("llama-untied")
    inputs = batch(model)
    expected = run(model, inputs, 0)[1]
    with sliced(model).running((), inputs, lambda _: 3):
        loss = model(**inputs).loss
    loss.backward(retain_graph=True)
    loss.backward()
    twice = {name: one / 2 for name, one in gradients(model).items()}
    assert_close(twice, expected)


def test_a_frozen_layer_whose_input_wants_no_gradient_is_not_computed_again() -> None:
    model = Plain(reentrant=False)
    model.embedding.weight.requires_grad_(False)
    for param in model.layers[0].parameters():
        param.requires_grad_(False)
    calls: list[int] = []
    linear = model.layers[0].linear2
    whole = linear.forward
    linear.forward = lambda states: (calls.append(len(states)), whole(states))[1]
    ids = torch.randint(50, (ROWS, LENGTH))
    model(ids).backward()
    expected = gradients(model)
    calls.clear()
    with sliced(model).running((ids,), {}, lambda _: 3):
        loss = model(ids)
    loss.backward()
    assert calls == [2, 2, 2, 1, 2, 2, 2]  # the last four prove
    assert_close(gradients(model), expected)


def test_a_layer_that_gives_up_leaves_random_numbers_as_they_were() -> None:
    class Sums(nn.Module):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(states, 0.5)[:1]  # not all sequences

    model = Plain(reentrant=False)
    model.layers[1] = Sums()
    ids = torch.randint(50, (ROWS, LENGTH))
    torch.manual_seed(3)
    expected = model(ids)
    torch.manual_seed(3)
    with sliced(model).running((ids,), {}, lambda _: 3):
        found = model(ids)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


class Keeping(nn.Module):
    """Keeps a number of its output in a list that is not its own."""

    def __init__(self, kept: list[torch.Tensor], *, has_graph: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self._append = kept.append
        self._has_graph = has_graph

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        computed = self.linear(states)
        mean = computed.square().mean()
        self._append(mean if self._has_graph else mean.detach())
        return states + computed


@pytest.mark.parametrize("place", [0, 1])
def test_a_loss_that_a_layer_keeps_in_a_list_of_the_script_is_an_error(place: int) -> None:
    """Also behind a frozen embedding, where no input of the layer wants a gradient."""
    kept: list[torch.Tensor] = []
    model = Plain(reentrant=False)
    model.embedding.requires_grad_(place != 0)
    model.layers[place] = Keeping(kept, has_graph=True)
    ids = torch.randint(50, (ROWS, LENGTH))
    with sliced(model).running((ids,), {}, lambda _: 3):
        loss = model(ids)
    with pytest.raises(RuntimeError, match="Keeping keeps a tensor of a slice outside"):
        loss.backward()


def test_a_number_without_a_graph_may_be_kept() -> None:
    kept: list[torch.Tensor] = []
    model = Plain(reentrant=False)
    model.layers[1] = Keeping(kept, has_graph=False)
    ids = torch.randint(50, (ROWS, LENGTH))
    assert_as_whole(model, ids)
    assert len(kept) > 2 + 2  # the first of the whole batch, in forward and when it is recomputed


def test_a_cast_that_autocast_keeps_is_not_taken_for_a_kept_tensor() -> None:
    """Autocast keeps those of leaves, as a slice is one, until its context ends."""
    model = Plain(reentrant=False)
    model.layers[1] = nn.Linear(8, 8)
    ids = torch.randint(50, (ROWS, LENGTH))
    with torch.autocast("cpu", torch.bfloat16):
        assert_as_whole(model, ids, rel=2e-2)


def test_a_graph_in_a_cycle_of_references_is_not_taken_for_a_kept_tensor() -> None:
    class Cycle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            computed = self.linear(states)
            cycle: list[object] = [computed]
            cycle.append(cycle)
            return states + computed

    model = Plain(reentrant=False)
    model.layers[1] = Cycle()
    ids = torch.randint(50, (ROWS, LENGTH))
    assert_as_whole(model, ids)


class OfStates(Plain):
    """Is given hidden states instead of tokens."""

    def __init__(self) -> None:
        super().__init__(reentrant=False)
        self.embedding = nn.Identity()


@pytest.mark.parametrize("how", ["create_graph", "inputs", "grad"])
def test_what_slices_cannot_differentiate_is_an_error(how: str) -> None:
    model = OfStates()
    states = torch.randn(ROWS, LENGTH, 8, requires_grad=True)
    with sliced(model).running((states,), {}, lambda _: 3):
        loss = model(states)
    if how == "create_graph":
        with pytest.raises(RuntimeError, match="create_graph"):
            loss.backward(create_graph=True)
    elif how == "inputs":
        with pytest.raises(RuntimeError, match="inputs="):
            loss.backward(inputs=[states])
    else:
        with pytest.raises(RuntimeError, match=r"torch\.autograd\.grad"):
            torch.autograd.grad(loss, [states])
    assert states.grad is None
    assert gradients(model) == {}
