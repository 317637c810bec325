"""Toy models whose layers run in slices, without DeepSpeed, and the comparison of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memascend.slices.layers import Slicer
from memascend.slices.model import SlicedModel
from tests.parity import families

ROWS, LENGTH = 6, 16
#: Sequences that a head in slices of two computes once more in its first pass.
IN_PROOF = (2, 1, 1)


class Weights:
    """Notes the slices of each pass."""

    #: Forward or backward, and the numbers of the slices that began.
    passes: ClassVar[list[tuple[str, list[int]]]] = []

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        pass

    @contextmanager
    def in_forward(self) -> Iterator[Callable[[int], None]]:
        numbers: list[int] = []
        self.passes.append(("forward", numbers))
        yield numbers.append

    @contextmanager
    def in_backward(self, count: int) -> Iterator[Callable[[int], None]]:
        numbers: list[int] = []
        self.passes.append(("backward", numbers))
        yield numbers.append
        assert numbers == list(range(count))


def sliced(model: nn.Module, **options: Any) -> SlicedModel:
    return SlicedModel(model, Slicer(Weights), **{"slices_head": True} | options)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    return found


def run(model: nn.Module, inputs: dict[str, Any], count: int) -> tuple[float, dict[str, Any]]:
    """The loss and the gradients; count 0: without slices."""
    if count == 0:
        loss = model(**inputs).loss
    else:
        with sliced(model).running((), inputs, lambda _: count):
            loss = model(**inputs).loss
    loss.backward()
    return loss.item(), gradients(model)


def assert_as_whole(model: nn.Module, ids: torch.Tensor, rel: float = 2e-6) -> None:
    """Three slices of tokens have the gradients of the whole batch."""
    model(ids).backward()
    expected = gradients(model)
    with sliced(model).running((ids,), {}, lambda _: 3):
        loss = model(ids)
    loss.backward()
    assert_close(gradients(model), expected, rel)


def make(family: str) -> nn.Module:
    torch.manual_seed(0)
    model = families.maker(family)().float().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def batch(model: Any, *, padded: bool = True) -> dict[str, Any]:
    ids = torch.randint(1, families.VOCABULARY - 1, (ROWS, LENGTH))
    inputs: dict[str, Any] = families.inputs(model.config, ids)
    before = inputs["input_ids"].shape[1] - LENGTH
    mask = torch.ones_like(ids)
    if padded:
        mask[2, 10:] = mask[5, 3:] = 0
    inputs["labels"] = nn.functional.pad(ids.masked_fill(mask == 0, -100), (before, 0), value=-100)
    inputs["attention_mask"] = nn.functional.pad(mask, (before, 0), value=1)
    return inputs


def assert_close(found: dict[str, Any], expected: dict[str, Any], rel: float = 2e-6) -> None:
    assert found.keys() == expected.keys()
    largest = max(one.norm() for one in expected.values())
    for name, one in expected.items():
        error = (found[name] - one).norm()
        assert error <= rel * one.norm() + 1e-9 * largest, name


class Plain(nn.Module):
    """A model of a script's own, with torch's checkpoints."""

    def __init__(self, *, reentrant: bool, probability: float = 0.0) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embedding = nn.Embedding(50, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=probability, batch_first=True)
            for _ in range(2)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states = self.embedding(ids)
        for layer in self.layers:
            states = checkpoint(layer, states, use_reentrant=self.reentrant)
        return (states[..., 0] * states[..., 1].exp()).mean()
