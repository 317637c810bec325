"""Clipping of Muon's updates: the norm by shapes, and the advice."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from memascend.config.deepspeed import parse_deepspeed
from memascend.plan.muon import advise_muon, matrices_of, update_norm
from memascend.plan.shapes import ModelShapes, TensorShape, builtin

MUON = {"type": "Muon", "params": {}}


def shapes_of(*shapes: tuple[int, ...]) -> list[TensorShape]:
    return [TensorShape(str(number), shape) for number, shape in enumerate(shapes)]


def test_matrices_are_what_deepspeed_gives_to_muon() -> None:
    names = ["model.embed_tokens.weight", "layers.0.up.weight", "lm_head.weight", "norm.weight"]
    dims = [(8, 4), (8, 4), (8, 4), (4,)]
    frozen = TensorShape("layers.1.up.weight", (8, 4), trainable=False)
    model = ModelShapes("m", (*map(TensorShape, names, dims), frozen))
    assert [one.name for one in matrices_of(model)] == ["layers.0.up.weight"]


@pytest.mark.parametrize("shape", [(8, 8), (4, 16), (48, 8)])
def test_the_norm_is_that_of_orthogonal_matrices(shape: tuple[int, int]) -> None:
    u, _, v = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    update = u @ v * math.sqrt(max(1, shape[0] / shape[1]))
    assert update_norm(shapes_of(shape)) == pytest.approx(float(update.norm()))


def test_each_matrix_of_experts_counts() -> None:
    one, four = shapes_of((8, 4)), shapes_of((4, 8, 4))
    assert update_norm(four) == pytest.approx(2 * update_norm(one))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"gradient_clipping": 1.0}, "gradient_clipping is 1.0"),
        ({}, "gradient_clipping is 1.0"),
        ({"gradient_clipping": "auto"}, 'gradient_clipping is "auto"'),
        ({"gradient_clipping": 0}, ""),
        ({"gradient_clipping": 1e6}, ""),
        ({"gradient_clipping": 1.0, "optimizer": {"type": "AdamW"}}, ""),
    ],
)
def test_clipping_of_updates_is_told_with_its_number(keys: dict[str, Any], words: str) -> None:
    shapes = builtin("Llama-3.1-8B")
    settings = parse_deepspeed({"optimizer": MUON, "zero_optimization": {"stage": 3}} | keys)
    found = advise_muon(shapes, settings)
    assert words in found
    assert bool(found) == bool(words)
    if found:
        norm = update_norm(matrices_of(shapes))
        assert f"about {norm:,.0f} for this model" in found
