"""Plans under a limit: the smallest one to the byte, what shrinks first, and what is kept."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memascend.base.sizes import STAGING_SLOT_BYTES
from memascend.base.units import GIB, KIB, MIB
from memascend.plan.derive import LimitTooSmallError, Plan, PlanRequest, derive
from memascend.plan.drive_rates import DriveRates
from memascend.plan.knobs import (
    SMALL_NUMEL,
    SPARE_COUNT,
    STAGING_SLOT_BYTES_KNEE,
    TILE_NUMEL,
    TILE_NUMEL_KNEE,
    TILE_TO_CHUNK_COST,
)
from memascend.plan.shapes import ModelShapes, builtin
from tests.support.examples import examples
from tests.support.plan_models import decoder

COMPONENTS = [
    "bounce buffers",
    "staging slots",
    "optimizer tiles",
    "optimizer scratch",
    "parameter slots",
    "resident cache",
]


shapes_of = st.builds(
    decoder,
    layers=st.integers(1, 6),
    hidden=st.integers(1, 900),
    vocabulary=st.integers(1, 9000),
    frozen=st.booleans(),
)
requests = st.builds(
    PlanRequest,
    world=st.integers(1, 9),
    gradient_accumulation_steps=st.integers(1, 3),
    precision=st.sampled_from(["bf16", "fp16", "fp32"]),
    accumulation_dtype=st.sampled_from([None, "fp16", "fp32"]),
    master_dtype=st.sampled_from(["fp32", "bf16"]),
    optimizer=st.sampled_from(["AdamW", "Lion", "SGD", "Lamb", "Unheard"]),
    sub_group_size=st.integers(0, 10**7),
    has_decay_groups=st.booleans(),
    optimizer_device=st.sampled_from(["nvme", "nvme", "cpu"]),
    reuse_numel=st.sampled_from([0, 10**4, 10**9]),
    tile_bytes=st.sampled_from([None, None, 64 * KIB, 100_000, MIB]),
    prefetch_bytes=st.sampled_from([None, None, 0, 12345, MIB]),
    has_activations=st.booleans(),
    drive_count=st.sampled_from([1, 1, 2, 8, 64]),
)


def minimum_bytes(shapes: ModelShapes, request: PlanRequest) -> int:
    with pytest.raises(LimitTooSmallError) as caught:
        derive(shapes, request=request, limit_bytes=0)
    return caught.value.minimum_bytes


@given(shapes=shapes_of, request=requests)
@settings(deadline=None, max_examples=examples(150))
def test_the_smallest_limit_works_and_one_byte_less_does_not(
    shapes: ModelShapes, request: PlanRequest
) -> None:
    least = minimum_bytes(shapes, request)
    plan = derive(shapes, request=request, limit_bytes=least)
    assert plan.host_bytes == least
    with pytest.raises(LimitTooSmallError):
        derive(shapes, request=request, limit_bytes=least - 1)


@given(shapes=shapes_of, request=requests, data=st.data())
@settings(deadline=None, max_examples=examples(300))
def test_every_plan_keeps_its_limit_and_its_own_rules(
    shapes: ModelShapes, request: PlanRequest, data: st.DataObject
) -> None:
    default = derive(shapes, request=request)
    least = minimum_bytes(shapes, request)
    limit = data.draw(st.integers(least, 2 * default.host_bytes + 32 * shapes.numel))
    plan = derive(shapes, request=request, limit_bytes=limit)
    assert plan.host_bytes <= limit
    for either in (default, plan):
        check_rules(either)
    if limit >= default.host_bytes:
        assert plan.host | {"resident cache": 0} == default.host
        stays = sum(plan.resident.values())
        full = stays == sum(default.drive.values()) - copies_of_gradients(default)
        assert full or plan.host_bytes > limit - 4 * KIB
    else:
        assert plan.host["resident cache"] == 0
        assert all(plan.host[name] <= default.host[name] for name in plan.host)


def components(request: PlanRequest) -> list[str]:
    begin = COMPONENTS.index("staging slots") + 1
    activations = ["activation slots"] if request.has_activations else []
    return [*COMPONENTS[:begin], *activations, *COMPONENTS[begin:]]


def copies_of_gradients(plan: Plan) -> int:
    window = plan.request.window
    beside = window.drive_bytes - window.sum_itemsize
    return plan.drive["gradients"] * beside // window.drive_bytes


def check_rules(plan: Plan) -> None:
    assert list(plan.host) == components(plan.request)
    staging_bytes = plan.host["staging slots"]
    assert plan.host.get("activation slots", staging_bytes) == staging_bytes
    assert all(nbytes % (4 * KIB) == 0 for nbytes in plan.host.values())
    assert plan.tile_numel % 4096 == 0
    assert 2 <= plan.staging_slot_count <= 4 * plan.drive_count <= 4 * plan.request.drive_count
    assert 256 * KIB <= plan.staging_slot_bytes <= 8 * MIB
    assert plan.parameter_slots_bytes >= 4 * MIB
    assert 0 < plan.slot_bytes_max <= plan.parameter_slots_bytes // 4
    assert plan.slot_bytes_max % (4 * KIB) == 0
    assert plan.prefetch_bytes <= plan.parameter_slots_bytes
    for stream, nbytes in plan.drive.items():
        assert min(nbytes, plan.read_bytes[stream], plan.written_bytes[stream]) >= 0
    assert plan.passes_read_bytes <= sum(plan.read_bytes.values())


@given(shapes=shapes_of, request=requests, more=st.integers(0, 100 * MIB))
@settings(deadline=None, max_examples=examples(100))
def test_a_higher_limit_never_moves_more_bytes(
    shapes: ModelShapes, request: PlanRequest, more: int
) -> None:
    least = minimum_bytes(shapes, request)
    low, high = (derive(shapes, request=request, limit_bytes=n) for n in (least, least + more))
    assert sum(high.read_bytes.values()) <= sum(low.read_bytes.values())
    assert sum(high.written_bytes.values()) <= sum(low.written_bytes.values())


def test_what_shrinks_and_in_which_order() -> None:
    shapes, request = builtin("Llama-3.1-8B"), PlanRequest()
    default = derive(shapes, request=request)
    changed = []
    limit = default.host_bytes
    while True:
        try:
            plan = derive(shapes, request=request, limit_bytes=limit)
        except LimitTooSmallError:
            break
        for knob in ("prefetch_bytes", "tile_numel", "staging_slot_bytes", "slot_bytes_max"):
            if getattr(plan, knob) < getattr(default, knob) and knob not in changed:
                changed.append(knob)
        limit -= 4 * MIB
    assert changed == ["prefetch_bytes", "staging_slot_bytes", "tile_numel", "slot_bytes_max"]


def test_tiles_and_staging_slots_divide_what_there_is_by_the_root_of_cost_and_price() -> None:
    shapes, request = decoder(layers=30, hidden=1024), PlanRequest()
    default = derive(shapes, request=request)
    plan = derive(shapes, request=request, limit_bytes=default.host_bytes // 2)
    tiles = plan.host["optimizer tiles"] + plan.host["optimizer scratch"]
    # For each element 3 tiles of 16 bytes and 4 of scratch; for each byte of a slot 4 of them.
    ratio = math.sqrt(TILE_TO_CHUNK_COST * 52 / (4 * 2))
    assert tiles / plan.host["staging slots"] == pytest.approx(ratio, rel=0.05)


def test_a_layer_goes_in_chunks_before_tiles_are_too_small_for_the_drive() -> None:
    shapes, request = builtin("Llama-3.1-8B"), PlanRequest()
    for limit in (1 * GIB, 256 * MIB, 64 * MIB, 26 * MIB):
        plan = derive(shapes, request=request, limit_bytes=limit)
        assert plan.tile_numel >= TILE_NUMEL_KNEE
        assert plan.staging_slot_bytes >= STAGING_SLOT_BYTES_KNEE
    assert plan.slot_bytes_max < derive(shapes, request=request).slot_bytes_max


def test_at_the_minimum_slots_are_1_mib_and_tiles_16_ki_elements() -> None:
    shapes, request = builtin("Llama-3.1-8B"), PlanRequest()
    plan = derive(shapes, request=request, limit_bytes=minimum_bytes(shapes, request))
    assert plan.tile_numel == 16 << 10
    assert (plan.staging_slot_count, plan.staging_slot_bytes) == (2, 256 * KIB)
    assert (plan.parameter_slots_bytes, plan.slot_bytes_max) == (4 * MIB, MIB)
    assert plan.host_bytes < 10 * MIB


def test_fixed_knobs_do_not_shrink() -> None:
    shapes = builtin("Llama-3.1-8B")
    request = PlanRequest(tile_bytes=MIB, prefetch_bytes=3 * MIB)
    plan = derive(shapes, request=request, limit_bytes=minimum_bytes(shapes, request))
    assert (plan.tile_bytes, plan.prefetch_bytes) == (MIB, 3 * MIB)


def test_the_cache_takes_parameters_first_and_gradients_when_accumulating() -> None:
    shapes = decoder()
    default = derive(shapes, request=PlanRequest())
    limit = default.host_bytes + 3 * MIB
    assert derive(shapes, request=PlanRequest(), limit_bytes=limit).resident == {
        "parameters": 3 * MIB,
        "gradients": 0,
        "master weights": 0,
        "optimizer state": 0,
    }
    # A byte of parameters is read in each micro-step and by the step, which writes it; one of
    # gradients is written and read in each micro-step, but once for what a sum displaces.
    for steps, first in ((2, "parameters"), (4, "gradients")):
        assert (steps + 2 > 2 * steps - 1) == (first == "parameters")
        accumulating = PlanRequest(gradient_accumulation_steps=steps)
        plan = derive(shapes, request=accumulating, limit_bytes=limit)
        assert {name for name, nbytes in plan.resident.items() if nbytes} == {first}
    assert plan.resident["gradients"] == 3 * MIB
    # Two places for each; what a sum in memory displaces is on the drive.
    assert plan.drive["gradients"] == 2 * 2 * shapes.numel - 3 * MIB
    assert plan.written_bytes["gradients"] == 4 * (2 * shapes.numel - 3 * MIB) + 3 * MIB
    # In fp32 most gradients wait as they arrive: what memory saves is less than with parameters.
    accumulating = PlanRequest(gradient_accumulation_steps=2, accumulation_dtype="fp32")
    limit = derive(shapes, request=accumulating).host_bytes + 3 * MIB
    plan = derive(shapes, request=accumulating, limit_bytes=limit)
    assert (plan.resident["parameters"], plan.resident["gradients"]) == (3 * MIB, 0)


def test_with_room_for_everything_the_drive_is_idle() -> None:
    plan = derive(decoder(), request=PlanRequest(), limit_bytes=100 * GIB)
    assert plan.drive_bytes == 0
    assert plan.step_seconds(DriveRates()) == 0
    assert plan.host["resident cache"] < 16 * decoder().numel + 16 * KIB


def test_a_limit_too_small_says_what_is_needed_and_which_knob_costs_what() -> None:
    request = PlanRequest(tile_bytes=MIB, prefetch_bytes=5 * MIB)
    with pytest.raises(LimitTooSmallError) as caught:
        derive(builtin("Llama-3.1-8B"), request=request, limit_bytes=MIB)
    error = caught.value
    assert error.minimum_bytes == sum(error.needed.values())
    for part in (
        "1048576 bytes (1.00 MiB)",
        f"at least {error.minimum_bytes} bytes",
        "optimizer tiles      12.00 MiB",
        "streaming.optimizer.tile_bytes=1048576 costs 13.00 MiB",
        "buffer_pool.prefetch_bytes=5242880 costs 5.00 MiB",
    ):
        assert part in str(error)
    with pytest.raises(LimitTooSmallError, match=r"Lamb.*sub_group_size"):
        derive(builtin("Llama-3.1-8B"), request=PlanRequest(optimizer="Lamb"), limit_bytes=MIB)


# -- several drives --------------------------------------------------------------------------------

#: Default sizes of one drive, which must not change: host bytes, and bytes read ahead.
OF_ONE_DRIVE = {
    "Llama-3.1-70B": (3212869632, 939524096),
    "Llama-3.1-8B": (880820224, 234881024),
    "Mixtral-8x7B": (276905984, 67108864),
    "Qwen2.5-14B": (1067495424, 283115520),
    "Qwen2.5-32B": (1916841984, 566231040),
    "Qwen2.5-7B": (965771264, 271581184),
}
CHUNK_BYTES = 2 * MIB


@pytest.mark.parametrize("model", OF_ONE_DRIVE)
def test_one_drive_has_the_sizes_that_it_always_had(model: str) -> None:
    plan = derive(builtin(model), request=PlanRequest())
    assert (plan.host_bytes, plan.prefetch_bytes) == OF_ONE_DRIVE[model]
    assert (plan.tile_numel, plan.tile_count) == (1 << 20, 3)
    assert (plan.staging_slot_bytes, plan.staging_slot_count) == (8 * MIB, 4)


def requests_for_each_drive(plan: Plan) -> dict[str, float]:
    """Return the requests of CHUNK_BYTES that each drive can have in flight, by path."""
    request = plan.request
    tiles_read = (plan.tile_count - 1) // 2  # one is computed, as many are written as are read
    read_bytes = request.master_itemsize + request.states_bytes + request.gradient_itemsize
    moved = {
        "tiles read": tiles_read * plan.tile_numel * read_bytes,
        "gradients": plan.staging_slot_count * plan.staging_slot_bytes,
        "parameters": min(plan.prefetch_bytes, plan.parameter_slots_bytes // 2),  # share_bytes
    }
    return {path: nbytes / CHUNK_BYTES / request.drive_count for path, nbytes in moved.items()}


@pytest.mark.parametrize(("model", "parameters"), [("Mixtral-8x7B", 11.5), ("Llama-3.1-8B", 16)])
@pytest.mark.parametrize("during_backward", [False, True])
def test_each_of_eight_drives_has_the_least_depth_of_one(
    model: str, parameters: float, during_backward: bool
) -> None:
    """But where layers are small: no more than half of the slots may be read ahead."""
    one, eight = (
        derive(
            builtin(model), request=PlanRequest(drive_count=count, during_backward=during_backward)
        )
        for count in (1, 8)
    )
    found = requests_for_each_drive(eight)
    assert found == {
        "tiles read": 7,
        "gradients": 16,
        "parameters": pytest.approx(parameters, 0.01),
    }
    # In backward each tile that is read, or written, has a gradient that waits for it.
    assert one.spare_count == (SPARE_COUNT if during_backward else 0)
    assert eight.spare_count - one.spare_count == (14 if during_backward else 0)


def test_under_a_limit_the_sizes_are_those_of_as_many_drives_as_fit() -> None:
    shapes, request = builtin("Llama-3.1-8B"), PlanRequest(drive_count=8)
    of = [derive(shapes, request=PlanRequest(drive_count=1 + more)) for more in range(8)]
    for limit_bytes, found in (
        (of[7].host_bytes, of[7]),
        (of[7].host_bytes - 1, of[6]),
        (of[2].host_bytes, of[2]),
        (of[1].host_bytes - 1, of[0]),
    ):
        plan = derive(shapes, request=request, limit_bytes=limit_bytes)
        assert plan.host == found.host
        assert plan.drive_count == found.drive_count
    for limit_bytes in (of[0].host_bytes // 2, minimum_bytes(shapes, PlanRequest())):
        plan = derive(shapes, request=request, limit_bytes=limit_bytes)
        one = derive(shapes, request=PlanRequest(), limit_bytes=limit_bytes)
        assert (plan.drive_count, plan.host) == (1, one.host)


def test_only_what_is_left_beside_the_depth_of_all_drives_keeps_tensors_in_memory() -> None:
    shapes, request = builtin("Llama-3.1-8B"), PlanRequest(drive_count=2)
    whole_bytes = derive(shapes, request=request).host_bytes
    plan = derive(shapes, request=request, limit_bytes=whole_bytes + GIB)
    assert (plan.host["resident cache"], plan.drive_count) == (GIB, 2)
    assert derive(shapes, request=request, limit_bytes=whole_bytes - 1).resident == {}


def test_a_small_model_gets_no_tile_or_slot_that_it_could_not_fill() -> None:
    shapes = decoder(layers=2, hidden=600, vocabulary=900)
    plan = derive(shapes, request=PlanRequest(drive_count=64))
    assert (plan.tile_count - 1) * plan.tile_numel < shapes.numel
    assert (plan.staging_slot_count - 2) * plan.staging_slot_bytes < 2 * shapes.numel
    assert plan.prefetch_bytes <= 2 * shapes.numel + 4 * KIB * len(shapes.tensors)


# -- small models ----------------------------------------------------------------------------------


def test_a_model_of_26_million_parameters_takes_the_part_of_the_defaults_that_it_is() -> None:
    shapes = decoder(layers=32, hidden=512, vocabulary=9000)
    assert shapes.numel == pytest.approx(26e6, rel=0.01)
    plan = derive(shapes, request=PlanRequest())
    part = shapes.numel / SMALL_NUMEL
    assert plan.tile_numel == pytest.approx(part * TILE_NUMEL, rel=0.02)
    moving = ("optimizer tiles", "optimizer scratch")
    assert sum(plan.host[name] for name in moving) < 22 * MIB
    # Layers here are tiny: what is read ahead is the part as well.
    assert plan.prefetch_bytes == pytest.approx(part * 32 * MIB, rel=0.02)
    two = derive(shapes, request=PlanRequest(world=2))
    assert two.tile_numel == TILE_NUMEL_KNEE


@pytest.mark.parametrize(("model", "world"), [("Qwen2.5-7B", 64), ("Llama-3.1-8B", 8)])
def test_what_is_left_of_a_large_model_on_many_ranks_is_not_small(model: str, world: int) -> None:
    plan = derive(builtin(model), request=PlanRequest(world=world))
    assert (plan.tile_numel, plan.staging_slot_bytes) == (TILE_NUMEL, STAGING_SLOT_BYTES)
    assert plan.prefetch_bytes == 32 * MIB


@given(shapes=shapes_of, request=requests)
@settings(deadline=None, max_examples=examples(100))
def test_nothing_is_larger_than_what_passes_through_it(
    shapes: ModelShapes, request: PlanRequest
) -> None:
    plan = derive(shapes, request=request)
    itemsize = max(request.param_itemsize, request.gradient_itemsize)
    numel = sum(tensor.shard_numel(request.world) for tensor in shapes.tensors)
    learning = sum(tensor.shard_numel(request.world) for tensor in shapes.trainable)
    if request.tile_bytes is None and request.is_tiled:
        last = plan.tile_numel if plan.tile_count > 3 else 0  # only a part of it exists
        assert plan.tile_count * plan.tile_numel < learning + last + plan.tile_count * 4096
    if not request.has_activations:  # their slots follow the tokens
        slots_bytes = plan.staging_slot_count * plan.staging_slot_bytes
        beside = plan.staging_slot_bytes if plan.staging_slot_count > 4 else 0
        assert slots_bytes <= max(4 * 256 * KIB, 4 / 3 * numel * itemsize + beside + 4 * 4 * KIB)


def test_reading_ahead_has_no_room_for_what_takes_no_slot() -> None:
    plan = derive(decoder(layers=4, hidden=512, vocabulary=80_000), request=PlanRequest())
    assert plan.prefetch_bytes == 4 * (2 * 2 * 512 * 512 + 4 * KIB)


def test_of_large_layers_two_are_read_ahead_though_the_model_is_small() -> None:
    plan = derive(decoder(layers=4, hidden=1400, vocabulary=200), request=PlanRequest())
    assert plan.prefetch_bytes == pytest.approx(4 * 1400 * 1400 * 2, rel=0.01)


def test_slots_of_activations_are_as_large_for_small_models() -> None:
    plan = derive(decoder(layers=1, hidden=64), request=PlanRequest(has_activations=True))
    assert plan.host["activation slots"] == 4 * STAGING_SLOT_BYTES


def test_tiles_of_a_small_model_are_not_below_the_knee_of_what_is_fast() -> None:
    plan = derive(decoder(layers=2, hidden=600, vocabulary=900), request=PlanRequest())
    assert plan.tile_numel == TILE_NUMEL_KNEE


def test_all_gradients_of_a_small_model_have_room_in_the_staging_slots() -> None:
    shapes = decoder(layers=2, hidden=600, vocabulary=900)
    plan = derive(shapes, request=PlanRequest())
    assert plan.staging_slot_bytes < STAGING_SLOT_BYTES
    assert (plan.staging_slot_count - 1) * plan.staging_slot_bytes >= 2 * shapes.numel


def test_a_run_that_tries_is_planned_after_backward_with_the_memory_of_both() -> None:
    after, tries, early = (
        derive(builtin("Llama-3.1-8B"), request=PlanRequest(verify="reads", **changes))
        for changes in ({}, {"tries_during_backward": True}, {"during_backward": True})
    )
    assert tries.host == early.host
    assert tries.spare_count == early.spare_count > after.spare_count == 0
    same = {"read_bytes", "written_bytes", "drive", "early_numel", "held_up", "resident"}
    assert {name: getattr(tries, name) for name in same} == {
        name: getattr(after, name) for name in same
    }


def test_memory_for_trying_makes_no_buffer_smaller() -> None:
    shapes, request = builtin("Llama-3.1-8B"), PlanRequest(tries_during_backward=True)
    plain = PlanRequest()
    enough = derive(shapes, request=request).host_bytes
    assert derive(shapes, request=request, limit_bytes=enough).spare_count > 0
    for limit_bytes in (enough - 1, enough // 2):
        plan = derive(shapes, request=request, limit_bytes=limit_bytes)
        assert plan == derive(shapes, request=plain, limit_bytes=limit_bytes)
