"""One pass per step beside accumulation: its traffic, and the fewest slices that fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from memascend.base.units import GIB
from memascend.config.block import ActivationConfig, MicroBatchConfig
from memascend.plan.context import OURS_ON_DEVICE, Training
from memascend.plan.derive import PlanRequest, derive
from memascend.plan.fit import DEVICE, HOST, Room
from memascend.plan.one_pass import Comparison, Step, compare, fewest_slices, smaller_slices
from memascend.plan.shapes import builtin
from tests.support.source_tree import ROOT
from tests.support.trainings import training

BATCH, CONTEXT = 16, 4096
HIDDEN_BYTES = BATCH * CONTEXT * 4096 * 2  # one hidden state of the batch
GB = 10**9
OFF = ActivationConfig(enabled=False)


def limited(**changes: Any) -> Training:
    """Return a training of Llama-3.1-8B within 6 GiB of host memory."""
    request = PlanRequest(has_activations=True)
    ours = derive(builtin("Llama-3.1-8B"), request=request, limit_bytes=6 * GIB)
    return training(ours=ours, **changes)


def compared(count: int, **changes: Any) -> Comparison:
    """Compare with a stated number of slices, without a stated device."""
    start = limited(micro_batches=MicroBatchConfig(count=count), **changes)
    return compare(start, None, batch=BATCH, context=CONTEXT)


def moved(step: Step) -> int:
    return step.read_bytes + step.written_bytes


def room(gib: int) -> Room:
    return Room(device_bytes=gib * GIB)


def test_one_pass_moves_a_quarter_of_what_sixteen_micro_steps_do() -> None:
    """8 billion parameters, 65,536 tokens, checkpoints on the device."""
    found = compared(16, activations=OFF)
    one_pass, accumulation = found.one_pass, found.accumulation
    assert (one_pass.micro_steps, accumulation.micro_steps) == (1, 16)
    assert one_pass.tokens == accumulation.tokens == BATCH * CONTEXT
    assert moved(accumulation) == pytest.approx(1008 * GB, rel=0.005)
    assert moved(one_pass) < moved(accumulation) / 4
    # Each writes and reads the half of a master weight less that is its parameter, which the step
    # reads instead, where it is not in memory.
    numel, plan = builtin("Llama-3.1-8B").numel, one_pass.plan
    saved_bytes = 2 * 2 * numel - plan.drive["parameters"]
    request = dataclasses.replace(plan.request, wants_split_master=False)
    whole = derive(builtin("Llama-3.1-8B"), request=request, limit_bytes=6 * GIB)
    moved_bytes = sum(whole.read_bytes.values()) + sum(whole.written_bytes.values())
    assert moved_bytes - moved(one_pass) == saved_bytes == pytest.approx(21.6 * GB, rel=0.005)
    per_token = one_pass.per_million_tokens(moved(one_pass)) / 10**6
    assert per_token * BATCH * CONTEXT == pytest.approx(moved(one_pass))


@pytest.mark.parametrize("count", [4, 8, 16])
def test_the_traffic_of_one_pass_does_not_grow_with_its_slices(count: int) -> None:
    one, many = (compared(number, activations=OFF) for number in (1, count))
    assert moved(many.one_pass) == pytest.approx(moved(one.one_pass), rel=0.01)
    assert moved(many.accumulation) > moved(many.one_pass) * (1 + count / 8)


def test_checkpoints_on_the_drive_are_counted() -> None:
    on_device, on_drive = compared(8, activations=OFF).one_pass, compared(8).one_pass
    assert moved(on_drive) - moved(on_device) == 2 * (32 + 2) * HIDDEN_BYTES


def test_slices_of_one_sequence_leave_room_for_more_checkpoints_than_the_fewest() -> None:
    start = limited(has_fused_loss=True)
    chosen = compare(start, room(24), batch=32, context=CONTEXT)
    found = smaller_slices(start, room(24), chosen, context=CONTEXT)
    assert found is not None
    context, kept = found
    now = chosen.one_pass.context
    assert context.slice_tokens == CONTEXT < now.slice_tokens
    assert context.device_bytes + kept == 24 * GIB
    kept_now = 24 * GIB - now.device_bytes
    assert context.drive_bytes - kept < now.drive_bytes - kept_now
    stated = limited(has_fused_loss=True, micro_batches=MicroBatchConfig(sequences=2))
    for training_, batch in ((stated, 32), (start, 2), (start, 4096)):
        compared_ = compare(training_, room(24), batch=batch, context=CONTEXT)
        assert smaller_slices(training_, room(24), compared_, context=CONTEXT) is None


def test_micro_steps_of_the_configuration_are_one_pass_each() -> None:
    request = PlanRequest(gradient_accumulation_steps=3, has_activations=True)
    ours = derive(builtin("Llama-3.1-8B"), request=request)
    start = training(ours=ours, micro_batches=MicroBatchConfig(sequences=6))
    found = compare(start, None, batch=BATCH, context=CONTEXT)
    one_pass, accumulation = found.one_pass, found.accumulation
    assert (one_pass.micro_steps, one_pass.slices, one_pass.sequences) == (3, 3, 16)
    assert (accumulation.micro_steps, accumulation.slices, accumulation.sequences) == (9, 1, 6)
    assert accumulation.plan.request.gradient_accumulation_steps == 9
    assert one_pass.tokens == 3 * BATCH * CONTEXT
    assert one_pass.context.slice_tokens == accumulation.context.tokens == 6 * CONTEXT


@pytest.mark.parametrize(
    ("gib", "one_pass_gb", "accumulation_gb"), [(24, 271, 595), (48, 234, 389)]
)
def test_the_table_of_one_pass_is_what_the_documents_have(
    gib: int, one_pass_gb: int, accumulation_gb: int
) -> None:
    found = compare(limited(), room(gib), batch=BATCH, context=CONTEXT)
    assert round(moved(found.one_pass) / GB) == one_pass_gb
    assert round(moved(found.accumulation) / GB) == accumulation_gb
    page = (ROOT / "docs" / "context.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith(f"| {gib} GiB | "))
    assert f"| {found.one_pass.slices} of {found.accumulation.sequences} sequences |" in row
    assert row.endswith(f"| {one_pass_gb} GB | {accumulation_gb} GB |")


@pytest.mark.parametrize(
    ("gib", "slices", "place"), [(160, 1, "device"), (48, 4, "device"), (24, 8, "drive")]
)
def test_the_fewest_slices_that_fit_are_chosen(gib: int, slices: int, place: str) -> None:
    start = training()
    found = compare(start, room(gib), batch=BATCH, context=CONTEXT)
    assert found.is_chosen
    assert (found.one_pass.slices, found.one_pass.context.way.place) == (slices, place)
    assert found.one_pass.context.device_bytes <= gib * GIB
    assert found.lacks == {}
    if slices > 1:
        longer = -(-BATCH // (slices - 1)) * CONTEXT
        way = found.one_pass.context.way
        plan = start.plan(way, BATCH * CONTEXT, slice_tokens=longer, device_bytes=gib * GIB)
        assert room(gib).short(plan)


def test_checkpoints_go_to_the_drive_only_if_no_number_of_slices_keeps_them() -> None:
    found = compare(training(), room(24), batch=BATCH, context=CONTEXT)
    smallest = training().plan(
        OURS_ON_DEVICE, BATCH * CONTEXT, slice_tokens=CONTEXT, device_bytes=24 * GIB
    )
    assert room(24).short(smallest)
    # Those of a micro-step are small.
    assert found.accumulation.context.way.place == "device"


def test_a_stated_number_is_kept_even_if_it_does_not_fit() -> None:
    start = training(micro_batches=MicroBatchConfig(count=2))
    found = compare(start, room(24), batch=BATCH, context=CONTEXT)
    assert (found.one_pass.slices, found.is_chosen) == (2, False)
    assert found.lacks == {DEVICE: found.one_pass.context.device_bytes - 24 * GIB}


def test_where_nothing_fits_slices_are_as_small_as_can_be() -> None:
    assert fewest_slices(training(), room(8), batch=BATCH, context=CONTEXT) is None
    found = compare(training(), room(8), batch=BATCH, context=CONTEXT)
    assert (found.one_pass.slices, found.is_chosen, set(found.lacks)) == (BATCH, True, {DEVICE})
    tiny = Room(device_bytes=160 * GIB, host_bytes=GIB)
    assert set(compare(training(), tiny, batch=BATCH, context=CONTEXT).lacks) == {HOST}


def test_without_a_device_and_a_number_the_batch_is_whole() -> None:
    found = compare(training(), None, batch=BATCH, context=CONTEXT)
    assert found.one_pass.slices == 1
    assert found.one_pass.context.way.place == "drive"  # as the block has it
    assert moved(found.one_pass) == moved(found.accumulation)
