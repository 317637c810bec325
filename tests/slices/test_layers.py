"""Checkpointed layers of any script run in slices, or stay whole with a reason."""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from memascend.slices.cut import CannotCut
from memascend.slices.layers import check_keeps_documents
from tests.support.sliced_models import (
    LENGTH,
    ROWS,
    Plain,
    assert_as_whole,
    assert_close,
    gradients,
    run,
    sliced,
)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_torch_are_cut(reentrant: bool, passes: list[Any]) -> None:
    torch.manual_seed(0)
    model = Plain(reentrant=reentrant)
    ids = torch.randint(50, (ROWS, LENGTH))
    assert_as_whole(model, ids)
    assert [numbers for _, numbers in passes] == [[0, 1, 2]] * 6  # embedding and layers


def test_statistics_of_the_batch_keep_a_layer_whole(caplog: Any, passes: list[Any]) -> None:
    model = Plain(reentrant=False)
    model.layers[0].norm1 = nn.BatchNorm1d(LENGTH)
    ids = torch.randint(50, (ROWS, LENGTH))
    with caplog.at_level(logging.WARNING), sliced(model).running((ids,), {}, lambda _: 3):
        model(ids).backward()
    assert "BatchNorm1d computes statistics of the batch" in caplog.text
    assert len([one for one in passes if one[0] == "forward"]) == 2  # the embedding, a layer


class Layer(nn.Module):
    """A layer whose weights a test can use in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kept: Any = None
        self.losses: list[torch.Tensor] = []

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(states))


class KeepsLoss(Layer):
    """Keeps a loss that the model adds."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        found = super().forward(states)
        self.kept = found.square().mean()
        return found


class AppendsLoss(Layer):
    """Keeps it in a list."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        found = super().forward(states)
        self.losses.append(found.square().mean())
        return found


class OneLayer(nn.Module):
    """One checkpointed layer, whose kept losses are added."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(50, 8), layer

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = checkpoint(self.layer, self.embedding(ids), use_reentrant=False)
        states, *losses = found if isinstance(found, tuple) else (found,)
        kept = getattr(self.layer, "kept", None)
        losses += [kept, *getattr(self.layer, "losses", ())]
        return states.square().mean() + sum(one.sum() for one in losses if one is not None)


class ReturnsLoss(Layer):
    """Returns a loss beside its states."""

    def forward(self, states: torch.Tensor) -> Any:
        found = super().forward(states)
        return found, found.square().mean()[None]


class ReturnsLossOfTwoDimensions(Layer):
    """Returns it as a batch of one sequence would have it."""

    def forward(self, states: torch.Tensor) -> Any:
        found = super().forward(states)
        return found, found.square().mean()[None, None]


class DependsOnSlice(Layer):
    """Returns more if no row begins with a positive value."""

    def forward(self, states: torch.Tensor) -> Any:
        found = super().forward(states)
        return found, None if (states[:, 0, 0] > 0).any() else found[:1]


def second_dimension() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=False)


def hooked(kind: str) -> nn.Module:
    layer = Layer()
    match kind:
        case "forward":
            layer.linear.register_forward_hook(lambda *call: setattr(layer, "kept", call[2]))
        case "pre":
            layer.linear.register_forward_pre_hook(lambda *_: None)
        case "backward":
            layer.register_full_backward_hook(lambda _, inputs, __: (inputs[0].sign(),))
        case "parameter":
            layer.linear.weight.register_hook(lambda gradient: gradient.sign())
        case _:
            layer.linear.weight.register_post_accumulate_grad_hook(_halve)
    return layer


def _halve(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad /= 2


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (second_dimension(), "batch in the second dimension"),
        (KeepsLoss(), "its attribute kept keeps"),
        (AppendsLoss(), "its attribute losses keeps"),
        (ReturnsLoss(), r"shape \(1,\) has no dimensions of 1 sequence"),
        (ReturnsLossOfTwoDimensions(), r"shape \(1, 1\) has no dimensions of 1 sequence"),
        (DependsOnSlice(), "not of the same shapes"),
        *((hooked(one), "has a hook, ") for one in ("forward", "pre", "backward")),
        *((hooked(one), "linear.weight has a hook, ") for one in ("parameter", "accumulated")),
    ],
)
def test_a_layer_of_which_slices_may_depend_stays_whole(
    layer: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = OneLayer(layer)
    ids = torch.randint(50, (ROWS, LENGTH))
    expected_loss = model(ids)
    expected_loss.backward()
    expected = gradients(model)
    layer.kept, layer.losses = None, []
    with caplog.at_level(logging.WARNING), sliced(model).running((ids,), {}, lambda _: ROWS):
        loss = model(ids)
    layer.losses = []
    loss.backward()
    assert re.search(reason, caplog.text)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-6)
    assert_close(gradients(model), expected)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_a_hook_of_all_modules_sees_the_whole_batch(kind: str, caplog: Any) -> None:
    """Also one that comes behind the first pass."""
    seen: list[int] = []

    def note(module: nn.Module, values: Any, *_: Any) -> None:
        if isinstance(module, nn.Linear):
            seen.append(len(values[0]))

    model, ids = OneLayer(Layer()), torch.randint(50, (ROWS, LENGTH))
    runs = sliced(model, slices_head=False)
    with caplog.at_level(logging.WARNING), runs.running((ids,), {}, lambda _: 3):
        model(ids)
    assert caplog.text == ""
    hook = getattr(nn.modules.module, f"register_module_{kind}_hook")(note)
    try:
        with caplog.at_level(logging.WARNING), runs.running((ids,), {}, lambda _: 3):
            model(ids).backward()
    finally:
        hook.remove()
    assert "Layer computes the whole batch at once: each module has a hook" in caplog.text
    assert set(seen) == {ROWS}


class Keeps(Layer):
    """Keeps a loss in its own way."""

    def __init__(self, start: Callable[[], Any], keep: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.keep = keep
        if torch.is_tensor(start()):
            self.register_buffer("aux", start())
        elif start() is not ABSENT:
            self.aux = start()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        found = super().forward(states)
        self.keep(self, found.square().mean())
        return found


class AddsKept(nn.Module):
    """Adds the losses that its layers keep."""

    def __init__(self, layers: list[Keeps], start: Callable[[], Any] | None) -> None:
        super().__init__()
        self.embedding, self.layers, self.start = nn.Embedding(50, 8), nn.ModuleList(layers), start

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states = self.embedding(ids)
        for layer in self.layers:
            if self.start is not None:
                layer.aux = self.start()
            states = checkpoint(layer, states, use_reentrant=False)
        kept = [one for layer in self.layers for one in tree_leaves(layer.aux)]
        return states.square().mean() + sum(kept)


ABSENT = object()


def set_aux(value_of: Callable[[Any, torch.Tensor], Any]) -> Callable[[Any, torch.Tensor], None]:
    return lambda layer, loss: setattr(layer, "aux", value_of(layer, loss))


@pytest.mark.parametrize(
    ("start", "keep", "begins_anew"),
    [
        (lambda: None, set_aux(lambda _, loss: loss), False),
        (lambda: ABSENT, set_aux(lambda _, loss: loss), False),
        (list, set_aux(lambda _, loss: [loss]), False),
        (lambda: ABSENT, set_aux(lambda _, loss: [loss]), False),
        (lambda: None, set_aux(lambda _, loss: (loss,)), False),
        (dict, lambda layer, loss: layer.aux.__setitem__("load", loss), False),
        (dict, lambda layer, loss: layer.aux.__setitem__("load", [loss]), False),
        (lambda: torch.zeros(()), set_aux(lambda _, loss: loss), False),
        (list, lambda layer, loss: layer.aux.append(loss), True),
        (deque, lambda layer, loss: layer.aux.append(loss), True),
        (list, set_aux(lambda layer, loss: [*layer.aux, loss]), True),
        (tuple, set_aux(lambda layer, loss: (*layer.aux, loss)), True),
        (dict, lambda layer, loss: layer.aux.setdefault("all", []).append(loss), True),
        (dict, lambda layer, loss: layer.aux.__setitem__(len(layer.aux), loss), True),
        (lambda: {"all": []}, lambda layer, loss: layer.aux["all"].append(loss), True),
    ],
)
@pytest.mark.parametrize("is_detached", [False, True])
def test_a_loss_that_a_layer_keeps_is_that_of_the_batch_in_each_pass(
    start: Any, keep: Any, begins_anew: bool, is_detached: bool, caplog: Any
) -> None:
    torch.manual_seed(0)

    def kept(layer: Any, loss: torch.Tensor) -> None:
        keep(layer, loss.detach() if is_detached else loss)

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        layers = [Keeps(start, kept) for _ in range(2)]
        models.append(AddsKept(layers, start if begins_anew else None))
    plain, in_slices = models
    ids, runs = torch.randint(50, (ROWS, LENGTH)), sliced(in_slices)
    for _ in range(3):
        expected = plain(ids)
        expected.backward()
        with caplog.at_level(logging.WARNING), runs.running((ids,), {}, lambda _: 3):
            found = in_slices(ids)
        found.backward()
        assert "its attribute aux keeps a value of the call" in caplog.text
        assert found.item() == pytest.approx(expected.item(), rel=1e-6)
        assert_close(gradients(in_slices), gradients(plain))
        for model in models:
            model.zero_grad()


class Has(Layer):
    """Multiplies by attributes."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        for one in tree_leaves(self.scales):
            states = states * one
        return super().forward(states)


class SetsScales(nn.Module):
    """Gives its layer values before each call."""

    def __init__(self, scales: Callable[[Any], Any]) -> None:
        super().__init__()
        self.embedding, self.layer, self.scales = nn.Embedding(50, 8), Has(), scales
        self.log = nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.layer.scales = self.scales(self)
        states = checkpoint(self.layer, self.embedding(ids), use_reentrant=False)
        return states.square().mean()


ROW_SCALES = torch.linspace(0.5, 1.5, ROWS)[:, None, None]


@pytest.mark.parametrize(
    ("scales", "reason"),
    [
        (lambda model: model.log.exp(), "attribute scales has a graph of gradients"),
        (lambda model: {"all": [model.log.exp()]}, "attribute scales has a graph of gradients"),
        (lambda _: ROW_SCALES, r"attribute scales of shape \(6, 1, 1\) may be of all sequences"),
        (lambda _: (ROW_SCALES,), r"attribute scales of shape \(6, 1, 1\) may be of all"),
        (lambda _: ROW_SCALES[:1], ""),
        (lambda model: model.log.detach(), ""),
    ],
)
def test_values_that_are_put_into_a_layer_keep_it_whole(
    scales: Any, reason: str, caplog: Any
) -> None:
    torch.manual_seed(0)
    model, ids = SetsScales(scales), torch.randint(50, (ROWS, LENGTH))
    expected_loss = model(ids)
    expected_loss.backward()
    expected = gradients(model)
    running = sliced(model, slices_head=False).running((ids,), {}, lambda _: 3)
    with caplog.at_level(logging.WARNING), running:
        loss = model(ids)
    loss.backward()
    assert re.search(reason, caplog.text)
    assert bool(caplog.text) == bool(reason)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-6)
    assert_close(gradients(model), expected)


def test_parameters_buffers_and_what_does_not_change_are_left_alone(caplog: Any) -> None:
    """Also a list that becomes another with the same tensors, and a number in place of another."""

    class Changes(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.of_rows = nn.Parameter(torch.ones(ROWS))
            self.in_list = [nn.Parameter(torch.ones(ROWS))]
            self.table, self.scale, self.calls = [torch.ones(8)], {"last": 0}, 0
            self.register_buffer("rows", torch.ones(ROWS))
            self.register_buffer("load", torch.zeros(()))
            self.register_buffer("count", torch.zeros((), dtype=torch.long))

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            self.table, self.scale = [*self.table], {"last": self.calls}
            self.load += states.detach().mean()
            self.count = self.count + 1
            self.calls += 1
            return super().forward(states) * self.table[0]

    model, ids = OneLayer(Changes()), torch.randint(50, (ROWS, LENGTH))
    runs = sliced(model, slices_head=False)
    for _ in range(2):
        with caplog.at_level(logging.WARNING), runs.running((ids,), {}, lambda _: 3):
            loss = model(ids)
        loss.backward()
    assert caplog.text == ""
    assert (model.layer.calls, model.layer.count.item()) == (12, 12)


class Scales(Layer):
    """Scales features by as many numbers as the batch has sequences."""

    def forward(self, states: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(states) * scales.sum()


class GivesScales(OneLayer):
    """Gives its layer the numbers of all sequences."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scales = torch.arange(1.0, ROWS + 1)
        found = checkpoint(self.layer, self.embedding(ids), scales, use_reentrant=False)
        return found.square().mean()


def test_numbers_for_all_sequences_are_not_cut_in_a_batch_as_long(caplog: Any) -> None:
    torch.manual_seed(0)
    model = GivesScales(Scales())
    ids = torch.randint(50, (ROWS, LENGTH))
    model(ids).backward()
    expected = gradients(model)
    with caplog.at_level(logging.WARNING), sliced(model).running((ids,), {}, lambda _: 3):
        model(ids).backward()
    assert "may be of all sequences" in caplog.text
    assert_close(gradients(model), expected)


def test_outputs_of_another_shape_are_computed_with_the_weights_that_are_gathered(
    passes: list[Any],
) -> None:
    """Ranks whose outputs have the shape gather them once."""
    model, ids = OneLayer(ReturnsLoss()), torch.randint(50, (ROWS, LENGTH))
    passes.clear()
    with sliced(model).running((ids,), {}, lambda _: ROWS):
        loss = model(ids)
    loss.backward()
    layers = [one for one in passes if one[1] != list(range(ROWS))]
    assert layers == [("forward", [0, 1]), ("backward", [0])]


@pytest.mark.parametrize("kind", ["linear_attention", "recurrent"])
def test_a_layer_whose_state_goes_through_a_packed_row_is_not_cut(kind: str) -> None:
    layer: Any = Layer()
    check_keeps_documents(layer)
    layer.layer_type = "full_attention"
    check_keeps_documents(layer)
    layer.layer_type = kind
    with pytest.raises(CannotCut, match=f"its {kind} may join the documents"):
        check_keeps_documents(layer)


def test_a_bias_of_as_many_heads_as_the_batch_has_sequences_is_not_cut(caplog: Any) -> None:
    config = transformers.MptConfig(
        d_model=32, n_heads=ROWS // 2, n_layers=1, expansion_ratio=2, max_seq_len=64, vocab_size=64
    )
    config.d_model = 8 * config.n_heads
    model: Any = transformers.MptForCausalLM(config).train()
    model.gradient_checkpointing_enable()
    ids = torch.randint(1, 60, (config.n_heads, LENGTH))
    inputs = {"input_ids": ids, "labels": ids}
    loss, expected = run(model, inputs, 0)
    found_loss, found = run(model, inputs, config.n_heads)
    assert "may have attention heads first" in caplog.text
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert_close(found, expected)
