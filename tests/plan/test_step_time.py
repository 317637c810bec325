"""The least time of a step: what hides behind compute, and what cannot."""

from __future__ import annotations

import dataclasses

import pytest

from memascend.base.sizes import LEFT_ONE_OF
from memascend.base.streams import GRADIENTS, MASTER, PARAMETERS, STATE
from memascend.plan.derive import SECOND_VALUES, Plan, PlanRequest, derive
from memascend.plan.drive_rates import DriveRates
from memascend.plan.shapes import ModelShapes, TensorShape, builtin
from memascend.plan.step_time import DriveTime

#: A drive that reads and writes at the same time as fast as it does either alone.
RATES = DriveRates(read_gb_s=5.0, write_gb_s=4.0, mixed_gb_s=1e9)
#: Drives that take time for reads alone, and for writes alone.
READS = DriveRates(read_gb_s=1.0, write_gb_s=1e9)
WRITES = DriveRates(read_gb_s=1e9, write_gb_s=1.0)
SHAPES = builtin("Qwen2.5-7B")
DRIVE = DriveTime(
    first_forward_s=2.0, backward_s=3.0, last_backward_s=3.0, optimizer_s=8.0, behind_s=9.0
)


@pytest.mark.parametrize(
    ("compute_s", "step_s", "unhidden_s"),
    [
        ((0.5, 1.0), 3 + 9, 7),  # the drive is slower in every part
        ((4.0, 8.0), 8 + 9, 5),
        ((9.0, 20.0), 20 + 9, 0),  # forward is as long as what it reads and the optimizer
        ((30.0, 2.0), 3 + 30, 0),
    ],
)
def test_the_optimizer_hides_behind_the_next_forward_pass(
    compute_s: tuple[float, float], step_s: float, unhidden_s: float
) -> None:
    assert DRIVE.step_s(*compute_s) == pytest.approx(step_s)
    assert DRIVE.unhidden_s(*compute_s) == pytest.approx(unhidden_s)


def test_the_last_layer_computes_when_the_optimizer_is_over() -> None:
    assert DRIVE.step_s(4.0, 8.0, last_layer_s=0.5) == pytest.approx(8 + 9 + 0.5)
    assert DRIVE.step_s(30.0, 8.0, last_layer_s=0.5) == pytest.approx(8 + 30)


def test_what_does_not_go_behind_comes_on_top() -> None:
    first = dataclasses.replace(DRIVE, goes_behind=False)
    assert first.step_s(30.0, 60.0) == pytest.approx(60 + 30 + 8)
    assert first.unhidden_s(30.0, 60.0) == 8.0


def test_the_first_micro_step_hides_the_optimizer_and_the_last_one_has_what_is_early() -> None:
    many = dataclasses.replace(DRIVE, micro_steps=4, forward_s=4.5, last_backward_s=9.0)
    assert many.step_s(4.0, 5.0) == pytest.approx(3 * (4.5 + 5) + 9 + 9)
    assert many.unhidden_s(4.0, 5.0) == pytest.approx((9 - 4) + (9 - 5))


def plan_of(**changes: object) -> Plan:
    return derive(SHAPES, request=PlanRequest(**changes))  # type: ignore[arg-type]


def passes_read(plan: Plan) -> int:
    """Return the bytes of parameters that forward and backward read; the step reads the others."""
    return plan.read_bytes[PARAMETERS] - plan.halves_read_bytes


def drive_time(ranks: int = 1, **changes: object) -> DriveTime:
    return DriveTime.of_plan(plan_of(**changes), RATES, ranks=ranks)


@pytest.mark.parametrize("steps", [1, 8])
def test_the_parts_of_a_plan_are_all_that_it_moves(steps: int) -> None:
    plan = plan_of(gradient_accumulation_steps=steps, accumulation_dtype="fp32")
    # A drive that reads alone, and one that writes alone, have to take all of it.
    # But it does not read values that the step hands over to the forward pass which waits for it.
    assert plan.handed_over_bytes > 0
    for rates, nbytes in (
        (READS, sum(plan.read_bytes.values()) - plan.handed_over_bytes),
        (WRITES, sum(plan.written_bytes.values())),
    ):
        drive = DriveTime.of_plan(plan, rates)
        assert drive.step_s(0.0, 0.0) == pytest.approx(nbytes / 1e9, rel=1e-3)
    assert drive.micro_steps == steps


def test_no_step_is_faster_than_the_drive_is_with_all_of_it() -> None:
    """Its floor is for parts that come one after the other; what runs together takes less."""
    drive = drive_time()
    assert max(drive.optimizer_s, drive.first_forward_s) <= drive.behind_s
    assert drive.behind_s <= drive.optimizer_s + drive.first_forward_s
    # The optimizer reads and writes both halves of weights, and states, and reads gradients.
    # Forward reads embedding and head, which have no slot; all else is handed over.
    slotless = 2 * max(one.numel for one in SHAPES.tensors) / SHAPES.numel
    read_s, written_s = (2 * slotless + 4 + 8 + 2) / 5e9, (4 + 8) / 4e9
    assert drive.behind_s == pytest.approx(max(read_s, written_s) * SHAPES.numel, rel=0.001)
    whole = drive_time(wants_split_master=False)  # it writes a whole weight, and the parameter
    written_s = (4 + 2 + 8) / 4e9
    assert whole.behind_s == pytest.approx(max(read_s, written_s) * SHAPES.numel, rel=0.001)


def test_trained_parameters_that_have_slots_are_handed_over() -> None:
    shapes = builtin("Llama-3.1-8B")
    slotless = 2 * 128256 * 4096 * 2  # the embedding and the head
    plan = derive(shapes, request=PlanRequest())
    assert plan.handed_over_bytes == plan.drive[PARAMETERS] - slotless
    for changes in ({"overlaps": False}, {"during_backward": True}, {"optimizer_device": "cpu"}):
        request = dataclasses.replace(PlanRequest(), **changes)
        assert derive(shapes, request=request).handed_over_bytes == 0, changes


def test_the_forward_pass_behind_a_step_finds_nothing_in_slots() -> None:
    plan = plan_of(gradient_accumulation_steps=2)
    drive = DriveTime.of_plan(plan, dataclasses.replace(READS, read_gb_s=5.0))
    assert drive.first_forward_s == pytest.approx(plan.drive[PARAMETERS] / 5e9)
    assert drive.forward_s < drive.first_forward_s
    back_s = 2 * plan.backward_parameters_bytes / 5e9
    whole_s = drive.first_forward_s + drive.forward_s + back_s
    assert whole_s == pytest.approx(passes_read(plan) / 5e9)


def test_a_backward_pass_reads_nothing_of_what_the_device_keeps() -> None:
    request = PlanRequest(gradient_accumulation_steps=8, reuse_numel=2 * SHAPES.numel)
    plan = derive(SHAPES, request=request)
    assert plan.backward_parameters_bytes == 0
    drive = DriveTime.of_plan(plan, dataclasses.replace(READS, read_gb_s=5.0))
    forwards_s = drive.first_forward_s + 7 * drive.forward_s
    assert forwards_s == pytest.approx(passes_read(plan) / 5e9)


def test_the_first_tiles_are_read_during_backward() -> None:
    plan = plan_of()
    drive = DriveTime.of_plan(plan, READS)
    ahead_bytes = plan.tile_count * plan.tile_numel * 12
    assert drive.last_backward_s - drive.backward_s == pytest.approx(ahead_bytes / 1e9)


@pytest.mark.parametrize("early", [False, True])
def test_a_step_reads_halves_for_as_long_as_whole_weights_and_writes_less(early: bool) -> None:
    changes = {"during_backward": early, "overlaps": False}
    halves, whole = plan_of(**changes), plan_of(wants_split_master=False, **changes)
    reading, writing = (1.0, 1e9), (1e9, 1.0)
    for (read_gb_s, write_gb_s), bytes_of_both in (
        (reading, (12 if early else 14, 12 if early else 14)),
        (writing, (12, 14)),
    ):
        for plan, element_bytes in zip((halves, whole), bytes_of_both, strict=True):
            rates = DriveRates(read_gb_s=read_gb_s, write_gb_s=write_gb_s, mixed_gb_s=1e9)
            drive = DriveTime.of_plan(plan, rates)
            during_s = drive.last_backward_s - drive.backward_s
            assert (drive.optimizer_s < during_s) == early
            assert drive.optimizer_s + during_s == pytest.approx(
                element_bytes * SHAPES.numel / 1e9, rel=1e-6
            )


def test_activations_are_written_in_forward_and_read_in_backward() -> None:
    plan, nbytes = plan_of(gradient_accumulation_steps=3), 10**11
    for rates in (READS, WRITES):
        without = DriveTime.of_plan(plan, rates)
        with_them = DriveTime.of_plan(plan, rates, activation_bytes=nbytes)
        added_s = with_them.step_s(0.0, 0.0) - without.step_s(0.0, 0.0)
        assert added_s == pytest.approx(3 * nbytes / 1e9)


def test_ranks_share_the_drive() -> None:
    assert drive_time(ranks=4).optimizer_s == pytest.approx(4 * drive_time().optimizer_s)


def test_what_is_stepped_during_backward_is_not_left_to_forward() -> None:
    plain, early = drive_time(), drive_time(during_backward=True)
    assert early.last_backward_s > plain.last_backward_s
    # It writes most; of gradients only those of the tiles that are left go to the drive.
    assert early.optimizer_s == pytest.approx(plain.optimizer_s / LEFT_ONE_OF, rel=0.01)
    assert early.unhidden_s(0.0, 18.0) < plain.unhidden_s(0.0, 18.0)
    alone = drive_time(during_backward=True, overlaps=False)
    assert (alone.optimizer_s, alone.goes_behind) == (0.0, False)
    assert alone.last_backward_s > early.last_backward_s
    assert alone.unhidden_s(1e3, 0.0) > 0
    assert alone.unhidden_s(1e3, 1e3) == 0.0
    # Only gradients of the embedding and the head find no room.
    during_s = alone.last_backward_s - alone.backward_s
    assert 0 < alone.last_held_up_s < 0.2 * during_s


def test_backward_and_the_drive_take_turns_for_gradients_without_room() -> None:
    """A large layer waits for the drive, whatever it could compute meanwhile."""
    layers = tuple(TensorShape(f"layers.{n}.weight", (8192, 8192)) for n in range(8))
    shapes, layer_bytes = ModelShapes("large layers", layers, {}), 2 * 8192 * 8192
    for room_bytes, beyond in ((None, 0.0), (layer_bytes, 0.0), (layer_bytes // 2, 1.0), (0, 1.0)):
        request = PlanRequest(during_backward=True, gradient_room_bytes=room_bytes)
        plan = derive(shapes, request=request)
        assert plan.gradient_room_bytes == (layer_bytes if room_bytes is None else room_bytes)
        # Blocks of tiles hold 11 of 64.
        assert plan.held_up == pytest.approx(beyond * (1 - 11 / 64))
        drive = DriveTime.of_plan(plan, RATES)
        held_up_s = plan.held_up * (drive.last_backward_s - drive.backward_s)
        assert drive.last_held_up_s == pytest.approx(held_up_s, rel=0.05)
        freely = dataclasses.replace(drive, last_held_up_s=0.0)
        waiting_s = drive.step_s(0.0, 100.0) - freely.step_s(0.0, 100.0)
        assert waiting_s == pytest.approx(drive.last_held_up_s)


def test_what_is_in_memory_takes_its_new_values_over_when_the_step_is_made() -> None:
    request = PlanRequest(during_backward=True, overlaps=False)
    plan = derive(SHAPES, request=request, limit_bytes=8 << 30)
    assert plan.read_bytes[SECOND_VALUES] > 0
    assert DriveTime.of_plan(plan, RATES).optimizer_s > 0


def test_what_has_its_master_weights_in_memory_is_not_stepped_during_backward() -> None:
    request = PlanRequest(during_backward=True)
    # Parameters, gradients and the other halves of master weights fit, and some of the states.
    limit_bytes = derive(SHAPES, request=request).host_bytes + (2 + 2 + 2 + 4) * SHAPES.numel
    plan = derive(SHAPES, request=request, limit_bytes=limit_bytes)
    assert plan.read_bytes[MASTER] == 0 < plan.read_bytes[STATE]
    drive = DriveTime.of_plan(plan, RATES)
    assert drive.last_backward_s == drive.backward_s
    read_bytes = plan.read_bytes[STATE] + plan.read_bytes[GRADIENTS]
    states_s = max(read_bytes / 5e9, plan.written_bytes[STATE] / 4e9)
    assert drive.optimizer_s == pytest.approx(states_s)
