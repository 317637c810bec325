"""The plan: its arithmetic, what lies on the drive and what moves."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from memascend.base.units import GIB, MIB, PAGE_BYTES, page_up
from memascend.errors import ConfigError
from memascend.plan.derive import SECOND_VALUES, Plan, PlanRequest, default_limit, derive
from memascend.plan.knobs import SPARE_COUNT
from memascend.plan.shapes import ModelShapes, TensorShape, builtin
from tests.support.plan_models import decoder
from tests.support.without_torch import printed_without_torch

# -- defaults --------------------------------------------------------------------------------------


def test_the_defaults_of_an_8b_model() -> None:
    plan = derive(builtin("Llama-3.1-8B"), request=PlanRequest())
    largest = 14336 * 4096 * 2
    layer = (3 * 14336 * 4096 + 2 * 4096 * 4096 + 2 * 1024 * 4096) * 2 + 2 * 8192
    tile = 1 << 20
    assert dict(plan.host) == {
        "bounce buffers": 4 * MIB,
        "staging slots": 4 * 8 * MIB,
        "optimizer tiles": 3 * tile * (4 + 8 + 2 + 2),
        "optimizer scratch": 4 * tile,
        "parameter slots": 2 * largest + layer + largest,
        "resident cache": 0,
    }
    assert plan.prefetch_bytes == 2 * largest
    assert plan.slot_bytes_max == largest
    assert (plan.tile_bytes, plan.tile_count, plan.is_tiled) == (4 * MIB, 3, True)
    assert plan.not_ours == {}
    assert plan.initialization_bytes == plan.step_bytes == plan.host_bytes


def test_a_70b_model_takes_at_most_5_gib() -> None:
    assert derive(builtin("Llama-3.1-70B"), request=PlanRequest()).host_bytes <= 5 * GIB


def test_the_embedding_does_not_count() -> None:
    small = derive(decoder(vocabulary=80_000), request=PlanRequest())
    large = derive(decoder(vocabulary=800_000), request=PlanRequest())
    assert small.host["parameter slots"] == large.host["parameter slots"]
    assert large.slot_bytes_max == 512 * 512 * 2


def test_fused_experts_go_in_chunks() -> None:
    plan = derive(builtin("Mixtral-8x7B"), request=PlanRequest())
    assert plan.slot_bytes_max == 4096 * 4096 * 2
    assert plan.host_bytes < GIB


@pytest.mark.parametrize(
    ("changes", "element_bytes"),
    [
        ({}, 16),
        ({"accumulation_dtype": "fp32"}, 18),
        ({"precision": "fp32"}, 16),
        ({"state_dtype": "bf16"}, 12),
        # Codes of 8 bits, and a scale of 4 bytes for 128 of them.
        ({"state_dtype": "int8"}, 8 + 2 * (1 + 1 / 32)),
        ({"state_dtype": "int8/bf16"}, 8 + 1 + 1 / 32 + 2),
        ({"optimizer": "Lion"}, 16),
        ({"optimizer": "Adagrad"}, 12),
        ({"optimizer": "SGD"}, 8),
        ({"optimizer": "SGD", "state_count": 1}, 12),
    ],
)
def test_a_tile_has_master_states_gradient_and_16_bit_result(
    changes: dict[str, Any], element_bytes: float
) -> None:
    plan = derive(decoder(), request=PlanRequest(**changes))
    assert plan.host["optimizer tiles"] == 3 * plan.tile_numel * element_bytes


def test_a_tile_is_never_larger_than_the_largest_sub_group() -> None:
    shapes = decoder(layers=3, hidden=64, vocabulary=100)
    plan = derive(shapes, request=PlanRequest(has_decay_groups=False, sub_group_size=5000))
    largest = 64 + 64 * 64 + 64 * 64  # a norm, and the layer behind it
    assert largest <= plan.tile_numel < largest + 4096 < shapes.numel / 3 + 4096


@pytest.mark.parametrize("optimizer", ["Lamb", "SomethingNew"])
def test_an_optimizer_that_looks_at_whole_tensors_takes_whole_sub_groups(optimizer: str) -> None:
    plan = derive(builtin("Llama-3.1-8B"), request=PlanRequest(optimizer=optimizer))
    assert (plan.tile_numel, plan.tile_count, plan.is_tiled) == (1_048_576_000, 1, False)


def test_ranks_share_parameters_and_tiles_stay() -> None:
    one, two = (derive(builtin("Qwen2.5-7B"), request=PlanRequest(world=w)) for w in (1, 2))
    assert two.drive_bytes * 2 == pytest.approx(one.drive_bytes, rel=1e-6)
    assert two.slot_bytes_max * 2 == one.slot_bytes_max
    assert two.tile_numel == one.tile_numel


def test_nothing_on_a_drive_is_an_error() -> None:
    request = PlanRequest(parameters_device="cpu", optimizer_device="none")
    with pytest.raises(ConfigError, match="nothing is on a drive"):
        derive(decoder(), request=request)


def test_what_is_on_the_cpu_is_named_as_not_ours() -> None:
    request = PlanRequest(optimizer_device="cpu")
    plan = derive(decoder(), request=request)
    assert (plan.tile_numel, plan.host["optimizer tiles"]) == (0, 0)
    assert plan.not_ours == {
        "DeepSpeed: optimizer and gradients on the CPU": decoder().numel * (4 + 8 + 4 + 2)
    }


# -- drive and traffic -----------------------------------------------------------------------------


def passes_read(plan: Plan) -> int:
    """Return the bytes of parameters that forward and backward read; the step reads the others."""
    return plan.read_bytes["parameters"] - plan.halves_read_bytes


def test_the_drive_holds_parameters_master_weights_states_and_gradients() -> None:
    numel = decoder().numel
    plan = derive(decoder(), request=PlanRequest())
    expected = {
        "parameters": 2 * numel,
        "gradients": 2 * numel,
        "master weights": 2 * numel,  # the other half of each is the parameter
        "optimizer state": 8 * numel,
    }
    assert plan.drive == expected
    accumulating = derive(decoder(), request=PlanRequest(gradient_accumulation_steps=3))
    assert accumulating.drive == expected | {"gradients": 2 * 2 * numel}
    request = PlanRequest(gradient_accumulation_steps=3, accumulation_dtype="fp32")
    waiting = derive(decoder(), request=request)
    assert waiting.drive == expected | {"gradients": (4 + 2 * 2) * numel}


def test_states_in_bf16_lie_and_move_in_half_of_the_bytes() -> None:
    numel = decoder().numel
    request = PlanRequest(reuse_numel=0, prefetch_bytes=0)
    wide = derive(decoder(), request=request)
    narrow = derive(decoder(), request=dataclasses.replace(request, state_dtype="bf16"))
    assert wide.drive_bytes - narrow.drive_bytes == 4 * numel
    assert narrow.drive["optimizer state"] == 4 * numel
    moved = [sum(p.read_bytes.values()) + sum(p.written_bytes.values()) for p in (wide, narrow)]
    # Of the passes 6: parameters twice, gradient. The optimizer reads 14 and writes 12: both halves
    # of a weight and states in each direction, and the gradient.
    assert [nbytes / numel for nbytes in moved] == [6 + 14 + 12, 6 + 10 + 8]
    assert wide.host["optimizer tiles"] - narrow.host["optimizer tiles"] == (
        3 * 4 * wide.tile_numel
    )


def test_a_step_during_backward_has_second_values_beside_those_on_the_drive() -> None:
    shapes = decoder(layers=4)
    usual = PlanRequest()
    early = PlanRequest(during_backward=True, overlaps=False)
    plan, other = derive(shapes, request=early), derive(shapes, request=usual)
    # All but the gradient: the parameter, the rest of its master weight, two states.
    assert plan.drive[SECOND_VALUES] == shapes.numel * (2 + 2 + 8)
    assert plan.drive_bytes - other.drive_bytes == plan.drive[SECOND_VALUES]
    assert (plan.read_bytes[SECOND_VALUES], plan.written_bytes[SECOND_VALUES]) == (0, 0)
    # Gradients of some tiles wait in memory, and go nowhere else.
    waiting_bytes = SPARE_COUNT * plan.tile_numel * 2
    assert plan.host["optimizer tiles"] - other.host["optimizer tiles"] == waiting_bytes
    assert plan.host_bytes - other.host_bytes == waiting_bytes
    assert (plan.read_bytes["gradients"], plan.written_bytes["gradients"]) == (0, 0)
    summed = dataclasses.replace(early, gradient_accumulation_steps=4, accumulation_dtype="fp32")
    after = dataclasses.replace(summed, during_backward=False)
    steps = [derive(shapes, request=one) for one in (summed, after)]
    for moved in ("read_bytes", "written_bytes"):
        gradients = [getattr(step, moved)["gradients"] for step in steps]
        assert gradients == [3 * 2 * shapes.numel, (3 * 2 + 4) * shapes.numel]
    # Of a quarter, which is left to the next forward pass, gradients go to the drive.
    for settings, itemsize in ((early, 2), (summed, 4)):
        behind = dataclasses.replace(settings, overlaps=True)
        steps = [derive(shapes, request=one) for one in (behind, settings)]
        for moved in ("read_bytes", "written_bytes"):
            left, none = (getattr(step, moved)["gradients"] for step in steps)
            assert left - none == itemsize * (shapes.numel // 4)
        assert steps[0].drive == steps[1].drive
    # Parameters in memory take over from the drive what was stepped beside them.
    limit_bytes = plan.host_bytes + page_up(shapes.numel * 2)
    plan = derive(shapes, request=early, limit_bytes=limit_bytes)
    assert plan.resident["parameters"] == plan.read_bytes[SECOND_VALUES] == shapes.numel * 2


def squares(count: int, width: int = 512) -> ModelShapes:
    names = (f"layers.{number}.weight" for number in range(count))
    return ModelShapes("squares", tuple(TensorShape(name, (width, width)) for name in names))


def test_gradients_of_a_guess_go_to_the_drive_and_are_not_read_again() -> None:
    shapes = decoder(layers=4)
    usual = PlanRequest()
    sure = dataclasses.replace(usual, during_backward=True, overlaps=False)
    guess = dataclasses.replace(sure, guesses=True)
    plan, other = derive(shapes, request=guess), derive(shapes, request=usual)
    assert plan.written_bytes == other.written_bytes | {SECOND_VALUES: 0}
    assert plan.read_bytes["gradients"] == 0
    certain = derive(shapes, request=sure)
    assert plan.drive == certain.drive
    assert plan.host == certain.host
    assert plan.read_bytes == certain.read_bytes


def test_gradients_of_sub_groups_that_are_in_memory_in_part_reach_the_drive() -> None:
    """No tile of them is stepped during backward; the others' gradients never get there."""
    shapes, square = squares(8), 512 * 512
    early = PlanRequest(during_backward=True, overlaps=False, sub_group_size=2 * square)
    parameters_bytes = 8 * square * 2
    host_bytes = derive(shapes, request=early).host_bytes
    # Master weights of one sub-group, and one page of the next.
    limit_bytes = host_bytes + parameters_bytes + 2 * square * 2 + PAGE_BYTES
    plan = derive(shapes, request=early, limit_bytes=limit_bytes)
    assert plan.resident["parameters"] == parameters_bytes
    assert plan.resident["master weights"] == 2 * square * 2 + PAGE_BYTES
    assert plan.early_numel == 4 * square
    assert plan.drive[SECOND_VALUES] == 4 * square * (2 + 2 + 8)
    for moved in (plan.read_bytes, plan.written_bytes):
        assert moved["gradients"] == 4 * square * 2
        assert moved[SECOND_VALUES] == parameters_bytes // 2
    # With one sub-group there would be none left, and gradients are kept in memory instead.
    whole = dataclasses.replace(early, sub_group_size=8 * square)
    assert derive(shapes, request=whole, limit_bytes=limit_bytes).early_numel in (0, 8 * square)


def test_memory_goes_where_it_saves_most() -> None:
    """The order of streams is the one of the plan's that moves least."""
    shapes, square = squares(16), 512 * 512
    early = PlanRequest(during_backward=True, sub_group_size=2 * square)
    summed = dataclasses.replace(early, gradient_accumulation_steps=4)
    limit_bytes = derive(shapes, request=early).host_bytes + 16 * square * 4
    for request, beside in ((early, "master weights"), (summed, "gradients")):
        resident = derive(shapes, request=request, limit_bytes=limit_bytes).resident
        assert {stream for stream, nbytes in resident.items() if nbytes} == {"parameters", beside}


def test_a_step_reads_and_writes_what_each_stream_needs() -> None:
    numel = decoder().numel
    request = PlanRequest(gradient_accumulation_steps=3, reuse_numel=0, prefetch_bytes=0)
    plan = derive(decoder(), request=request)
    states = {"master weights": 2 * numel, "optimizer state": 8 * numel}
    gradients = {"gradients": 3 * 2 * numel}
    # The step reads parameters once more, as the high halves of master weights.
    assert plan.read_bytes == {"parameters": (3 * 2 + 1) * 2 * numel} | gradients | states
    assert plan.written_bytes == {"parameters": 2 * numel} | gradients | states
    assert plan.passes_read_bytes == (3 * 2 * 2 + 2 * 2) * numel
    assert plan.passes_written_bytes == 3 * 2 * numel
    # In fp32 two of three wait to be added, and the step reads the sum.
    request = dataclasses.replace(request, accumulation_dtype="fp32")
    plan = derive(decoder(), request=request)
    assert plan.read_bytes["gradients"] == (2 * 2 + 4) * numel
    assert plan.passes_read_bytes == (3 * 2 * 2 + 2 * 2) * numel
    assert plan.written_bytes["gradients"] == plan.passes_written_bytes == (2 * 2 + 4) * numel
    # None does where it is reduced in fp32.
    plan = derive(decoder(), request=dataclasses.replace(request, arriving_dtype="fp32"))
    assert plan.written_bytes["gradients"] == 3 * 4 * numel


@pytest.mark.parametrize(("distance", "quarters"), [(0, 8), (1, 6), (2, 4), (3, 4)])
def test_backward_reads_what_the_device_does_not_keep_of_forward(
    distance: int, quarters: int
) -> None:
    numel = decoder().numel
    request = PlanRequest(reuse_numel=distance * numel, prefetch_bytes=0)
    plan = derive(decoder(), request=request)
    assert passes_read(plan) == pytest.approx(quarters / 4 * 2 * numel, rel=1e-6)


@pytest.mark.parametrize("steps", [1, 4])
def test_what_slots_hold_where_a_pass_turns_is_not_read_again(steps: int) -> None:
    shapes = ModelShapes(
        "square", tuple(TensorShape(f"layers.{n}.weight", (512, 512)) for n in range(200))
    )
    layer = 2 * 512 * 512
    request = PlanRequest(gradient_accumulation_steps=steps, reuse_numel=0)
    plan = derive(shapes, request=request)
    held = plan.parameter_slots_bytes
    assert plan.prefetch_bytes >= layer
    assert held < 200 * layer
    # Behind the last micro-step they are new.
    assert passes_read(plan) == steps * 2 * 200 * layer - (2 * steps - 1) * held
    reuse = dataclasses.replace(request, reuse_numel=2 * shapes.numel)  # all of forward
    plan = derive(shapes, request=reuse)
    assert passes_read(plan) == steps * 200 * layer - (steps - 1) * held
    roomy = derive(shapes, request=dataclasses.replace(request, prefetch_bytes=1 << 30))
    assert passes_read(roomy) == 200 * layer
    tight = derive(shapes, request=dataclasses.replace(request, prefetch_bytes=0))
    assert passes_read(tight) == steps * 2 * 200 * layer


def test_frozen_tensors_are_only_read() -> None:
    shapes = decoder(frozen=True)
    learning = sum(tensor.numel for tensor in shapes.trainable)
    plan = derive(shapes, request=PlanRequest(reuse_numel=0, prefetch_bytes=0))
    assert plan.drive["parameters"] == 2 * shapes.numel
    assert passes_read(plan) == 2 * 2 * shapes.numel
    assert plan.halves_read_bytes == plan.written_bytes["parameters"] == 2 * learning
    assert plan.drive["master weights"] == 2 * learning
    assert plan.drive["optimizer state"] == 8 * learning
    assert plan.written_bytes["gradients"] == 2 * learning


@pytest.mark.parametrize("itemsize", [1, 4])
def test_frozen_tensors_of_another_dtype_have_their_own_bytes(itemsize: int) -> None:
    """Packed weights, norms in fp32: on the drive, as they are read, and in the slots."""
    shapes, request = decoder(), PlanRequest(reuse_numel=0, prefetch_bytes=0, world=2)
    layer = [tensor for tensor in shapes.tensors if tensor.name.startswith("layers")]
    tensors = tuple(
        dataclasses.replace(tensor, trainable=False, itemsize=itemsize)
        if tensor in layer
        else tensor
        for tensor in shapes.tensors
    )
    mixed = dataclasses.replace(shapes, tensors=tensors)
    others = shapes.numel - sum(tensor.numel for tensor in layer)
    nbytes = (others * 2 + (shapes.numel - others) * itemsize) // 2
    plan = derive(mixed, request=request)
    assert plan.drive["parameters"] == nbytes
    assert passes_read(plan) == 2 * nbytes
    assert plan.halves_read_bytes == plan.written_bytes["parameters"] == others * 2 // 2
    assert plan.slot_bytes_max == 512 * 512 * itemsize // 2
    on_cpu = derive(mixed, request=dataclasses.replace(request, parameters_device="cpu"))
    assert on_cpu.not_ours == {"DeepSpeed: parameters on the CPU": nbytes}


# -- master weights in halves ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "read", "written", "on_drive"),
    [
        # Two passes; then gradient, both halves (or the whole weight), two states.
        ({}, 2 * 2 + 2 + (2 + 2) + 8, 2 + 2 + 2 + 8, 2 + 2 + 2 + 8),
        ({"wants_split_master": False}, 2 * 2 + 2 + 4 + 8, 2 + 2 + 4 + 8, 2 + 2 + 4 + 8),
        ({"state_dtype": "bf16"}, 2 * 2 + 2 + (2 + 2) + 4, 2 + 2 + 2 + 4, 2 + 2 + 2 + 4),
        (
            {"state_dtype": "int8"},
            2 * 2 + 2 + (2 + 2) + 66 / 32,
            2 + 2 + 2 + 66 / 32,
            2 + 2 + 2 + 66 / 32,
        ),
        (
            {"state_dtype": "int8/bf16"},
            2 * 2 + 2 + (2 + 2) + 97 / 32,
            2 + 2 + 2 + 97 / 32,
            2 + 2 + 2 + 97 / 32,
        ),
        (
            {"state_dtype": "int8", "low_itemsize": 1},
            2 * 2 + 2 + (2 + 1) + 66 / 32,
            2 + 2 + 1 + 66 / 32,
            2 + 2 + 1 + 66 / 32,
        ),
        (
            {"state_dtype": "int8", "low_itemsize": 1, "during_backward": True},
            2 * 2 + (2 + 1) + 66 / 32,
            2 + 1 + 66 / 32,
            (2 + 2 + 1 + 66 / 32) + (2 + 1 + 66 / 32),
        ),
        # No gradient gets to the drive; all that a step writes has a second place there.
        ({"during_backward": True}, 2 * 2 + (2 + 2) + 8, 2 + 2 + 8, (2 + 2 + 2 + 8) + (2 + 2 + 8)),
        (
            {"during_backward": True, "wants_split_master": False},
            2 * 2 + 4 + 8,
            2 + 4 + 8,
            (2 + 2 + 4 + 8) + (2 + 4 + 8),
        ),
        # With fp16 and fp32 parameters weights are whole; gradients follow the parameters.
        ({"precision": "fp16"}, 2 * 2 + 2 + 4 + 8, 2 + 2 + 4 + 8, 2 + 2 + 4 + 8),
        ({"precision": "fp32"}, 2 * 4 + 4 + 4 + 8, 4 + 4 + 4 + 8, 4 + 4 + 4 + 8),
        ({"master_dtype": "bf16"}, 2 * 2 + 2 + 2 + 8, 2 + 2 + 2 + 8, 2 + 2 + 2 + 8),
    ],
)
@pytest.mark.parametrize("world", [1, 2])
def test_a_master_weight_is_written_without_the_half_that_is_its_parameter(
    changes: dict[str, Any], read: float, written: float, on_drive: float, world: int
) -> None:
    settings = {"reuse_numel": 0, "prefetch_bytes": 0, "overlaps": False} | changes
    plan = derive(decoder(), request=PlanRequest(world=world, **settings))
    numel = decoder().numel // world
    for moved, element_bytes in (
        (plan.read_bytes, read),
        (plan.written_bytes, written),
        (plan.drive, on_drive),
    ):
        assert sum(moved.values()) == element_bytes * numel
    assert plan.halves_read_bytes == 2 * numel * plan.request.splits_master


def test_a_quarter_of_the_gradients_is_left_to_the_drive_in_an_early_step() -> None:
    settings = {"reuse_numel": 0, "prefetch_bytes": 0, "during_backward": True}
    plan = derive(decoder(), request=PlanRequest(**settings))
    numel = decoder().numel
    assert sum(plan.read_bytes.values()) == (4 + 4 + 8) * numel + 2 * numel // 4
    assert sum(plan.written_bytes.values()) == (2 + 2 + 8) * numel + 2 * numel // 4


def test_the_halves_of_parameters_in_memory_are_not_read_from_the_drive() -> None:
    request, numel = PlanRequest(), decoder().numel
    host_bytes = derive(decoder(), request=request).host_bytes
    kept_bytes = 3 * MIB
    plan = derive(decoder(), request=request, limit_bytes=host_bytes + kept_bytes)
    assert plan.resident["parameters"] == kept_bytes
    assert plan.halves_read_bytes == plan.drive["parameters"] == 2 * numel - kept_bytes
    assert plan.drive["master weights"] == 2 * numel
    limit_bytes = host_bytes + page_up(2 * numel)
    plan = derive(decoder(), request=request, limit_bytes=limit_bytes)
    assert plan.read_bytes["parameters"] == plan.halves_read_bytes == 0
    assert plan.read_bytes["master weights"] == 2 * numel


@pytest.mark.parametrize(
    "changes", [{"parameters_device": "cpu"}, {"optimizer_device": "cpu"}, {"max_in_cpu": 1}]
)
def test_without_parameters_on_the_drive_beside_them_master_weights_are_whole(
    changes: dict[str, Any],
) -> None:
    plan = derive(decoder(), request=PlanRequest(**changes))
    assert plan.halves_read_bytes == 0
    is_on_drive = plan.request.optimizer_device == "nvme"
    assert plan.drive["master weights"] == 4 * decoder().numel * is_on_drive


# -- as a value ------------------------------------------------------------------------------------


def test_a_plan_is_a_plain_frozen_value() -> None:
    plan = derive(decoder(), request=PlanRequest())
    assert json.loads(json.dumps(dataclasses.asdict(plan)))["host"] == plan.host
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.tile_numel = 1  # type: ignore[misc]


def test_the_plan_needs_neither_torch_nor_deepspeed() -> None:
    printed = printed_without_torch(
        "from memascend.plan.derive import PlanRequest, derive",
        "from memascend.plan.shapes import builtin",
        "print(derive(builtin('Qwen2.5-7B'), request=PlanRequest()).host_bytes)",
    )
    assert int(printed) > 800 * MIB


def test_parameters_that_the_user_keeps_in_memory_are_counted() -> None:
    config: dict[str, Any] = {
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "max_in_cpu": 1e9},
            "offload_optimizer": {"device": "nvme"},
        },
    }
    shapes = builtin("Llama-3.1-8B")
    request = PlanRequest.from_deepspeed(config)
    without = derive(shapes, request=dataclasses.replace(request, max_in_cpu=0))
    plan = derive(shapes, request=request)
    assert plan.host["parameters in cpu"] == 2 * 10**9
    assert plan.host_bytes == without.host_bytes + 2 * 10**9
    small = decoder(vocabulary=80_000)
    assert derive(small, request=request).host["parameters in cpu"] == 2 * small.numel
    # Under a limit the plan decides what stays in memory.
    config["memascend"] = {"host_memory_limit": "4GiB"}
    assert PlanRequest.from_deepspeed(config).max_in_cpu == 0


def test_the_default_is_the_plan_but_at_most_half_of_what_is_free() -> None:
    assert default_limit(3 * GIB, available=100 * GIB) == 3 * GIB
    assert default_limit(3 * GIB, available=4 * GIB) == 2 * GIB


# -- gradients that wait on the device -------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "world", "mib"), [("Llama-3.1-8B", 1, 416), ("Llama-3.1-8B", 4, 104)]
)
def test_gradients_of_one_layer_may_wait_on_the_device(name: str, world: int, mib: int) -> None:
    plan = derive(builtin(name), request=PlanRequest(world=world))
    assert plan.gradient_room_bytes == pytest.approx(mib * MIB, rel=0.001)
    other = derive(builtin(name), request=PlanRequest(world=world, gradient_room_bytes=0))
    assert (other.gradient_room_bytes, other.host) == (0, plan.host)


def test_only_a_step_in_tiles_leaves_gradients_on_the_device() -> None:
    for request in (PlanRequest(optimizer="Lamb"), PlanRequest(optimizer_device="cpu")):
        assert derive(decoder(), request=request).gradient_room_bytes == 0
