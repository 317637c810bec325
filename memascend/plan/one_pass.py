"""One pass per step beside accumulation: memory and traffic of the same sequences.

A step of B sequences is one micro-step whose layers compute it in k slices, or k micro-steps of
B / k sequences. One pass reads parameters and stores gradients once, accumulation k times; but the
checkpoints of one pass are those of all sequences. They go to the drive if the device has no room
for them: that traffic is counted.

Pure arithmetic; neither torch nor DeepSpeed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from memascend.plan.context import (
    OURS_CHECKPOINTS,
    OURS_ON_DEVICE,
    ContextPlan,
    Training,
    Way,
    with_activations,
)
from memascend.plan.derive import Plan, derive
from memascend.plan.fit import Room
from memascend.plan.footprint import Footprint

MILLION = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of one rank: how its sequences are divided, its memory and its traffic."""

    micro_steps: int
    sequences: int  # most sequences of a micro-step
    slices: int  # slices in which a layer computes a micro-step
    tokens: int  # tokens of the step
    context: ContextPlan  # device memory of a micro-step
    plan: Plan  # host memory and traffic without activations

    @property
    def footprint(self) -> Footprint:
        """The account with the traffic of activations."""
        return with_activations(self.plan, self.context.drive_bytes, self.micro_steps)

    @property
    def read_bytes(self) -> int:
        """Bytes that the step reads."""
        return sum(self.footprint.read_bytes.values())

    @property
    def written_bytes(self) -> int:
        """Bytes that the step writes."""
        return sum(self.footprint.written_bytes.values())

    def per_million_tokens(self, nbytes: int) -> float:
        """Return the bytes for each million tokens, from those of the step."""
        return nbytes * MILLION / self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The same sequences in one pass and by accumulation."""

    one_pass: Step
    accumulation: Step
    is_chosen: bool  # whether the plan chose the number of slices; else it is stated
    lacks: Mapping[str, int]  # bytes that one pass lacks, by memory


def compare(training: Training, room: Room | None, *, batch: int, context: int) -> Comparison:
    """Compare one pass over `batch` sequences of `context` tokens with accumulation.

    Slices are those of the block. If it states none, they are the fewest that fit `room`; if none
    fit, one sequence each. Without `room` and without a stated number the batch is whole.
    """
    stated = training.stated_slices
    slices = 1 if stated is None else stated.slices_of(batch)
    if stated is None and room is not None:
        slices = fewest_slices(training, room, batch=batch, context=context) or batch
    steps = training.ours.request.gradient_accumulation_steps
    sequences = -(-batch // slices)
    request = dataclasses.replace(training.ours.request, gradient_accumulation_steps=steps * slices)
    parts = {"tokens": batch * context * steps}
    one_pass = Step(
        micro_steps=steps,
        sequences=batch,
        slices=slices,
        context=_in_place(training, room, batch * context, sequences * context),
        plan=training.ours,
        **parts,
    )
    accumulation = Step(
        micro_steps=steps * slices,
        sequences=sequences,
        slices=1,
        context=_in_place(training, room, sequences * context, sequences * context),
        plan=derive(training.shapes, request=request, limit_bytes=training.ours.limit_bytes),
        **parts,
    )
    lacks = {} if room is None else room.short(one_pass.context)
    return Comparison(
        one_pass=one_pass, accumulation=accumulation, is_chosen=stated is None, lacks=lacks
    )


def fewest_slices(training: Training, room: Room, *, batch: int, context: int) -> int | None:
    """Return the fewest slices with which a batch fits, or None if no number does.

    Checkpoints stay on the device if that is possible with any number of slices, since the drive
    has no traffic of them then.
    """
    for way in (OURS_ON_DEVICE, OURS_CHECKPOINTS):

        def fits(slices: int, way: Way = way) -> bool:
            tokens, slice_tokens = batch * context, -(-batch // slices) * context
            return not room.short(_plan(training, way, room, tokens, slice_tokens))

        if fits(1):
            return 1
        if fits(batch):
            # One slice has neither sums nor whole tensors; from two on memory shrinks with slices.
            lacks, enough = 1, batch
            while enough - lacks > 1:
                middle = (lacks + enough) // 2
                lacks, enough = (lacks, middle) if fits(middle) else (middle, enough)
            return enough
    return None


def smaller_slices(
    training: Training, room: Room, comparison: Comparison, *, context: int
) -> tuple[ContextPlan, int] | None:
    """Return the memory in slices of one sequence, and the checkpoints that it leaves room for.

    None unless more of them stay on the device than with the slices that the plan chose.
    """
    step = comparison.one_pass
    if not (comparison.is_chosen and step.context.drive_bytes) or comparison.lacks:
        return None
    found = _plan(training, OURS_CHECKPOINTS, room, step.sequences * context, context)
    kept, kept_now = (
        min(one.drive_bytes, room.device_bytes - one.device_bytes) for one in (found, step.context)
    )
    return (found, kept) if found.drive_bytes - kept < step.context.drive_bytes - kept_now else None


def _in_place(training: Training, room: Room | None, tokens: int, slice_tokens: int) -> ContextPlan:
    """Return the memory with checkpoints on the device if they fit there, else on the drive.

    Without `room` the block decides.
    """
    if room is None:
        way = OURS_CHECKPOINTS if training.activations.enabled else OURS_ON_DEVICE
        return _plan(training, way, room, tokens, slice_tokens)
    on_device = _plan(training, OURS_ON_DEVICE, room, tokens, slice_tokens)
    if not room.short(on_device):
        return on_device
    return _plan(training, OURS_CHECKPOINTS, room, tokens, slice_tokens)


def _plan(
    training: Training, way: Way, room: Room | None, tokens: int, slice_tokens: int
) -> ContextPlan:
    device_bytes = 0 if room is None else room.device_bytes
    return training.plan(way, tokens, slice_tokens=slice_tokens, device_bytes=device_bytes)
