"""Clipping of Muon's updates: the norm by shapes, and the advice."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from memascend.config.deepspeed import parse_deepspeed
from memascend.plan.derive import SECOND_MATRICES, SECOND_VALUES, derive
from memascend.plan.muon import (
    EXAMPLE,
    advise_muon,
    applied_numel,
    matrices_numel,
    matrices_of,
    matrix_names,
    note_device,
    on_drive_numels,
    update_norm,
)
from memascend.plan.request import PlanRequest
from memascend.plan.shapes import ModelShapes, TensorShape, builtin
from memascend.plan.step_time import optimizer_parts

MUON = {"type": "Muon", "params": {}}


def shapes_of(*shapes: tuple[int, ...]) -> list[TensorShape]:
    return [TensorShape(str(number), shape) for number, shape in enumerate(shapes)]


def test_matrices_are_what_deepspeed_gives_to_muon() -> None:
    names = ["model.embed_tokens.weight", "layers.0.up.weight", "lm_head.weight", "norm.weight"]
    dims = [(8, 4), (8, 4), (8, 4), (4,)]
    frozen = TensorShape("layers.1.up.weight", (8, 4), trainable=False)
    model = ModelShapes("m", (*map(TensorShape, names, dims), frozen))
    assert [one.name for one in matrices_of(model)] == ["layers.0.up.weight"]


def test_a_model_that_says_itself_which_are_muons_is_believed() -> None:
    """A script that makes the optimizer chooses, whatever the names are."""
    told = {"embed.weight": True, "layers.0.up.weight": False, "norm.weight": True}
    dims = [(8, 4), (8, 4), (4,)]
    model = ModelShapes(
        "m",
        tuple(
            TensorShape(name, shape, uses_muon=is_muons)
            for (name, is_muons), shape in zip(told.items(), dims, strict=True)
        ),
    )
    assert [one.name for one in matrices_of(model)] == ["embed.weight"]


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


def test_a_model_that_is_not_known_has_the_norm_of_an_example() -> None:
    settings = parse_deepspeed({"optimizer": MUON, "gradient_clipping": 1.0})
    found = advise_muon(None, settings)
    norm = update_norm(matrices_of(builtin(EXAMPLE)))
    assert f"about {norm:,.0f} for {EXAMPLE}" in found
    assert "memascend plan MODEL" in found


# -- the plan --------------------------------------------------------------------------------------

#: Two matrices of 8192 x 1024 that Muon updates, in layers of their own, and no other parameter.
MATRICES = ModelShapes(
    "matrices",
    tuple(
        TensorShape(f"layers.{number}.up.weight", (8192, 1024), trainable=True)
        for number in range(2)
    ),
)


@pytest.mark.parametrize(
    ("changes", "weights", "momentum"),
    [
        ({}, 2 + 1 / 8, 2),  # low halves and flags
        ({"wants_split_master": False}, 4, 2),
        ({"state_dtype": "int8"}, 2, 1 + 4 / 128),  # a scale for 128 codes, and no flags
        ({"state_dtype": "int8/bf16"}, 2 + 1 / 8, 1 + 4 / 128),
    ],
    ids=str,
)
def test_a_step_of_matrices_moves_gradient_update_momentum_and_weights(
    changes: dict[str, Any], weights: float, momentum: float
) -> None:
    request = PlanRequest(optimizer="Muon", reuse_numel=0, **changes)
    plan, numel = derive(MATRICES, request=request), MATRICES.numel
    halves = 2 * request.splits_master
    # Two passes, the second without the shards that slots still hold.
    assert plan.read_bytes["parameters"] / numel <= 4 + halves
    others = {name: nbytes for name, nbytes in plan.read_bytes.items() if name != "parameters"}
    stored = 4 + momentum + weights  # gradient and update
    assert sum(others.values()) == stored * numel
    assert sum(plan.written_bytes.values()) == (stored + 2) * numel
    assert sum(plan.drive.values()) == (stored + 2) * numel
    assert plan.updates_bytes == 2 * numel
    assert plan.passes_written_bytes == 2 * numel
    before, after = optimizer_parts(plan, plan.read_bytes["gradients"])
    assert before.written + after.written == stored * numel


def test_without_clipping_no_update_is_moved() -> None:
    """Updates are applied as they are made, beside the old weights and momentum."""
    numel = MATRICES.numel
    request = PlanRequest(optimizer="Muon", reuse_numel=0)
    plan = derive(MATRICES, request=replace(request, applies_updates=True))
    others = {name: nbytes for name, nbytes in plan.read_bytes.items() if name != "parameters"}
    weights = 2 + 1 / 8  # low halves and flags
    assert sum(others.values()) == (2 + 2 + weights) * numel  # gradient, momentum
    assert sum(plan.written_bytes.values()) == (2 + 2 + weights + 2) * numel
    assert plan.updates_bytes == plan.handed_over_bytes == 0
    assert plan.drive[SECOND_MATRICES] == (2 + weights + 2) * numel
    assert sum(plan.drive.values()) == (8 + weights - 2 + 4 + weights) * numel
    assert plan.host == derive(MATRICES, request=request).host


@pytest.mark.parametrize("applies", [True, False])
def test_during_backward_no_gradient_of_a_matrix_is_moved_but_of_tiles_that_are_left(
    applies: bool,
) -> None:
    """In fp16 updates are not applied after backward."""
    numel = MATRICES.numel
    request = PlanRequest(optimizer="Muon", reuse_numel=0, applies_updates=applies)
    plan = derive(MATRICES, request=replace(request, during_backward=True))
    weights = 2 + 1 / 8  # low halves and flags
    left = 2 / 4  # updates of one tile of four
    others = {name: nbytes for name, nbytes in plan.read_bytes.items() if name != "parameters"}
    assert sum(others.values()) == (left + 2 + weights) * numel  # momentum
    assert sum(plan.written_bytes.values()) == (left + 2 + weights + 2) * numel
    assert plan.updates_bytes == plan.handed_over_bytes == 0
    assert SECOND_MATRICES not in plan.drive
    assert plan.drive[SECOND_VALUES] == (2 + weights + 2) * numel
    assert plan.early_numel == numel
    during, after = optimizer_parts(plan, left * numel)
    assert during.read == pytest.approx((2 + 2 + weights) * numel * 3 / 4)
    assert during.written == pytest.approx((2 + 2 + weights) * numel * 3 / 4)
    assert after.read == pytest.approx((left + (2 + 2 + weights) / 4) * numel)
    without_overlap = replace(request, during_backward=True, overlaps=False)
    assert derive(MATRICES, request=without_overlap).read_bytes["gradients"] == 0


def test_matrices_in_memory_are_stepped_after_backward_and_others_during_it() -> None:
    names = ("layers.0.up.weight", "layers.1.up.weight", "lm_head")
    model = ModelShapes("m", tuple(map(TensorShape, names, ((8, 4), (8, 4), (16, 4)), [True] * 3)))
    request = PlanRequest(optimizer="Muon", during_backward=True, sub_group_size=32)
    assert on_drive_numels(model, request, {}) == (64, 64)
    assert on_drive_numels(model, request, {"parameters": 1}) == (32, 64)
    assert on_drive_numels(model, request, {"master weights": 33}) == (0, 64)
    assert on_drive_numels(model, replace(request, optimizer="AdamW"), {}) == (0, 0)


@pytest.mark.parametrize(
    ("in_memory", "applied"),
    [({}, 64), ({"master weights": 1}, 32), ({"optimizer state": 33}, 0), ({"parameters": 80}, 32)],
)
def test_updates_of_matrices_that_are_in_memory_in_part_are_written(
    in_memory: dict[str, int], applied: int
) -> None:
    names = ("embed.weight", "layers.0.up.weight", "layers.1.up.weight", "lm_head")
    dims = ((16, 4), (8, 4), (8, 4), (16, 4))
    model = ModelShapes("m", tuple(map(TensorShape, names, dims, [True] * 4)))
    request = PlanRequest(optimizer="Muon", applies_updates=True, sub_group_size=32)
    assert applied_numel(model, request, in_memory) == applied
    assert applied_numel(model, replace(request, applies_updates=False), {}) == 0


@pytest.mark.parametrize(
    ("changes", "applies"),
    [
        ({}, True),
        ({"gradient_clipping": 1.0}, False),
        ({"gradient_clipping": "auto"}, False),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": False}}, False),
        ({"optimizer": {"type": "AdamW"}}, False),
        ({"memascend": {"streaming": {"optimizer": {"fused": False}}}}, False),
    ],
)
def test_updates_are_applied_where_nothing_scales_them_later(
    changes: dict[str, Any], applies: bool
) -> None:
    devices = {f"offload_{one}": {"device": "nvme"} for one in ("param", "optimizer")}
    ds_json = {
        "optimizer": MUON,
        "gradient_clipping": 0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3} | devices,
        "memascend": {},
    }
    assert PlanRequest.from_deepspeed(ds_json | changes).applies_updates is applies


def test_host_memory_under_a_limit_does_not_grow_with_the_layers() -> None:
    """Tiles, slots and staging do not depend on them; what is left of the limit keeps tensors."""
    host, without_cache = set(), set()
    for count in (4, 16, 64):
        tensors = tuple(
            TensorShape(f"layers.{number}.up.weight", (4096, 1024), trainable=True)
            for number in range(count)
        )
        request = PlanRequest(optimizer="Muon")
        plan = derive(ModelShapes("m", tensors), request=request, limit_bytes=64 << 20)
        host.add(plan.host_bytes)
        without_cache.add(plan.host_bytes - plan.host["resident cache"])
    assert max(host) <= 64 << 20
    assert len(host) == len(without_cache) == 1


def test_matrices_form_sub_groups_of_their_own() -> None:
    names = ("embed.weight", "layers.0.up.weight", "layers.0.norm", "layers.1.up.weight", "lm_head")
    dims = ((16, 4), (8, 4), (4,), (8, 4), (16, 4))
    model = ModelShapes(
        "m", tuple(TensorShape(*one, trainable=True) for one in zip(names, dims, strict=True))
    )
    muon, adam = PlanRequest(optimizer="Muon"), PlanRequest()
    assert matrix_names(model, muon) == {"layers.0.up.weight", "layers.1.up.weight"}
    assert matrix_names(model, adam) == frozenset()
    options = {"world": 1, "sub_group_size": 10**9, "has_decay_groups": True}
    groups = model.sub_groups(**options, matrices=matrix_names(model, muon))
    assert [[one.name for one in group] for group in groups] == [
        ["layers.0.up.weight", "layers.1.up.weight"],
        ["embed.weight", "lm_head"],
        ["layers.0.norm"],
    ]
    assert matrices_numel(model, muon) == 64
    assert matrices_numel(model, PlanRequest(optimizer="Muon", is_elementwise=False)) == 0


def test_the_device_memory_of_the_largest_update_is_told() -> None:
    shapes = builtin("Llama-3.1-8B")
    found = note_device(shapes, PlanRequest(optimizer="Muon"))
    assert "58,720,256 elements" in found
    assert "gate_proj" in found
    assert "in step()" in found
    assert found == note_device(shapes, PlanRequest(optimizer="Muon", world=2))
    early = note_device(shapes, PlanRequest(optimizer="Muon", during_backward=True))
    assert f"during backward: {found.partition('step(): ')[2].partition(', takes')[0]}" in early
    assert early.partition("takes")[2] != found.partition("takes")[2]
    assert note_device(shapes, PlanRequest()) == ""
