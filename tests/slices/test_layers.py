"""Checkpointed layers of any script run in slices, or stay whole with a reason."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from memascend.slices.cut import CannotCut
from memascend.slices.layers import check_keeps_documents
from tests.support.sliced_models import LENGTH, ROWS, Plain, assert_close, gradients, run, sliced


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_torch_are_cut(reentrant: bool, passes: list[Any]) -> None:
    torch.manual_seed(0)
    model = Plain(reentrant=reentrant)
    ids = torch.randint(50, (ROWS, LENGTH))
    model(ids).backward()
    expected = gradients(model)
    with sliced(model).running((ids,), {}, lambda _: 3):
        loss = model(ids)
    loss.backward()
    assert_close(gradients(model), expected)
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
