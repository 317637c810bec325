"""Least time of a step at a drive's rates: drive time, and the part of it that compute hides.

Pure arithmetic. The optimizer begins after the last backward pass, when norm and verdict are known,
and continues during the next forward pass, whose last layer cannot compute before the optimizer is
done. With several micro-steps this is the forward pass of the first one. Reads and writes of parts
that run together overlap as far as the drive's mixed rate lets them.

Gradients of a layer that find no room, on the device or in host memory, hold up backward: while the
drive takes them nothing is computed. That part is an estimate; it is 0 if a layer finds room.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from memascend.base.sizes import LEFT_ONE_OF
from memascend.base.streams import GRADIENTS, MASTER, PARAMETERS, STATE
from memascend.plan.derive import SECOND_VALUES, Plan
from memascend.plan.drive_rates import DriveRates


class _Moved(NamedTuple):
    """Bytes that a part of a step reads and writes."""

    read: float
    written: float

    def beside(self, other: _Moved) -> _Moved:
        return _Moved(self.read + other.read, self.written + other.written)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveTime:
    """Drive time of the parts of a step, in seconds."""

    first_forward_s: float  # the forward pass after a step; it reads all parameters on the drive
    forward_s: float = 0.0  # the forward pass of each further micro-step
    backward_s: float  # the backward pass of a micro-step
    last_backward_s: float  # the last backward pass, with the optimizer's reads or steps during it
    optimizer_s: float  # the rest of the optimizer
    behind_s: float  # the rest of the optimizer and the first forward pass, overlapped
    held_up_s: float = 0.0  # the part of a backward pass in which nothing is computed meanwhile
    last_held_up_s: float = 0.0  # the same of the last one
    micro_steps: int = 1
    goes_behind: bool = True  # whether the rest of the optimizer overlaps the first forward pass

    @classmethod
    def of_plan(
        cls,
        plan: Plan,
        rates: DriveRates,
        *,
        ranks: int = 1,
        activation_bytes: int = 0,
    ) -> DriveTime:
        """Return the drive time for the traffic of a plan.

        Each micro-step writes `activation_bytes` of saved activations in its forward pass, and
        reads them in its backward pass.
        """

        def seconds(moved: _Moved) -> float:
            return ranks * rates.seconds(moved.read, moved.written)

        steps = plan.request.gradient_accumulation_steps
        saved = _Moved(0, activation_bytes)
        first = _Moved(plan.drive[PARAMETERS], 0).beside(saved)
        back = _Moved(plan.backward_parameters_bytes, 0)
        passes_parameters = plan.read_bytes[PARAMETERS] - plan.halves_read_bytes
        further_bytes = passes_parameters - first.read - steps * back.read
        further = _Moved(further_bytes / max(1, steps - 1), 0).beside(saved)
        sums_read = plan.passes_read_bytes - passes_parameters
        # The last micro-step has more traffic of sums than the others. Spread evenly, the result
        # stays a lower bound.
        sums = _Moved(sums_read / steps, plan.passes_written_bytes / steps)
        backward = back.beside(sums).beside(_Moved(activation_bytes, 0))
        # If compute takes longer than this part, forward reads more, and the time is compute's.
        handed_over = _Moved(-plan.handed_over_bytes, 0)
        early, rest = optimizer_parts(plan, plan.read_bytes[GRADIENTS] - sums_read)
        return cls(
            first_forward_s=seconds(first),
            forward_s=seconds(further),
            backward_s=seconds(backward),
            last_backward_s=seconds(backward.beside(early)),
            optimizer_s=seconds(rest),
            behind_s=seconds(first.beside(rest).beside(handed_over)),
            held_up_s=plan.held_up * seconds(sums),
            last_held_up_s=plan.held_up * seconds(early if plan.request.during_backward else sums),
            micro_steps=steps,
            goes_behind=plan.request.overlaps,
        )

    def step_s(
        self, compute_forward_s: float, compute_backward_s: float, *, last_layer_s: float = 0.0
    ) -> float:
        """Return the least time of a step in steady state, from the compute time of its passes.

        `last_layer_s` is the part of `compute_forward_s` in the last layer.
        """
        further_s = max(compute_forward_s, self.forward_s)
        further_s += _beside(compute_backward_s, self.backward_s, self.held_up_s)
        first_s = max(compute_forward_s, self.first_forward_s) + self.optimizer_s
        if self.goes_behind:
            first_s = max(compute_forward_s, self.behind_s + last_layer_s)
        last_s = _beside(compute_backward_s, self.last_backward_s, self.last_held_up_s)
        return (self.micro_steps - 1) * further_s + first_s + last_s

    def unhidden_s(self, compute_forward_s: float, compute_backward_s: float) -> float:
        """Return the seconds that the optimizer adds to a step after all overlap."""
        passes = replace(
            self, last_backward_s=self.backward_s, optimizer_s=0.0, behind_s=self.first_forward_s
        )
        compute_s = compute_forward_s, compute_backward_s
        return self.step_s(*compute_s) - passes.step_s(*compute_s)


def _beside(compute_s: float, drive_s: float, held_up_s: float) -> float:
    """Return the time of a backward pass beside the drive, which holds it up for a part."""
    return max(compute_s, drive_s - held_up_s) + held_up_s


def optimizer_parts(plan: Plan, gradients_bytes: int) -> tuple[_Moved, _Moved]:
    """Return the optimizer's traffic during backward, and after it."""
    read, written, request = plan.read_bytes, plan.written_bytes, plan.request
    second_read, second_written = (moved.get(SECOND_VALUES, 0) for moved in (read, written))
    states = read[MASTER] + read[STATE] + plan.halves_read_bytes
    every = _Moved(
        states + gradients_bytes + second_read,
        written[MASTER]
        + written[STATE]
        + written[PARAMETERS]
        + second_written
        + plan.updates_bytes,
    )
    if not request.during_backward:
        # The first tiles are read during backward, without their gradients.
        tiles_numel = plan.tile_count * plan.tile_numel
        ahead = min(states, tiles_numel * (request.master_itemsize + request.states_bytes))
        return _Moved(ahead, 0), _Moved(every.read - ahead, every.written)
    # One in LEFT_ONE_OF of the early tiles is left to forward.
    numel = plan.early_numel * (1 - 1 / LEFT_ONE_OF if request.overlaps else 1)
    values_bytes = numel * (request.stored_master_itemsize + request.states_bytes)
    part = numel / max(1, plan.trained_numel)
    if request.is_muon:  # whose matrices have other states
        values_bytes = part * (read[MASTER] + read[STATE])
    during = _Moved(
        values_bytes + part * plan.halves_read_bytes,
        values_bytes + part * (written[PARAMETERS] + second_written),
    )
    return during, _Moved(every.read - during.read, every.written - during.written)
