"""Steps during backward that nobody demanded: `during_backward` "auto", the default.

The rule, each part of which leaves a step after backward and refuses no run:

1. the JSON lets a tile be stepped in one pass from and to the drive
   (`request.why_not_during_backward`);
2. host memory has room for gradients that wait, with every buffer at its default, and holds so few
   parameters that a step writes hardly more (`derive`);
3. the drive has room for second values, and for saving the run beside them: `lacking_bytes`,
   before each step that would begin so;
4. the run's own steps take less time so (`deepspeed/optimizer/worth.py`). Rates of the drive and a
   model do not tell that: it depends on how long backward computes.

Pure arithmetic, for one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from memascend.base.streams import PARAMETERS
from memascend.base.units import format_nbytes
from memascend.plan.derive import Plan, begun_early
from memascend.plan.optimizer_dtypes import BF16, FP32, INT8_BF16
from memascend.plan.request import ITEMSIZES
from memascend.plan.shapes import ModelShapes
from memascend.plan.step_time import optimizer_parts

#: Bytes of a parameter's weight and moments in fp32, which no form exceeds in a file.
_SAVED_ITEMSIZE = 3 * 4
#: Files of a checkpoint that have these; and copies of the parameters, one of them in a model.
_COPIES = 2


def second_values_bytes(plan: Plan) -> int:
    """Return the drive bytes of second values of all that is trained."""
    return math.ceil(plan.trained_numel * plan.request.second_values_bytes)


def model_bytes(plan: Plan) -> int:
    """Return the bytes of all parameters in their dtype, as the saved model has them."""
    return plan.drive[PARAMETERS] + plan.resident.get(PARAMETERS, 0)


def checkpoint_bytes(plan: Plan, *, is_portable: bool) -> int:
    """Return the bytes of this rank's part of a checkpoint, without alignment and small files.

    Master weights are in two files, states in two if `is_portable` (`checkpoint.portable`), else in
    one. Codes are decoded to fp32. A matrix of Muon has momentum alone. Frozen parameters are saved
    once.
    """
    request, numel = plan.request, plan.trained_numel
    itemsize = ITEMSIZES.get(request.state_dtype, ITEMSIZES[FP32])
    of_states = request.states * itemsize
    if request.state_dtype == INT8_BF16:
        of_states += ITEMSIZES[BF16] - itemsize
    others = numel - plan.matrices_numel
    states_bytes = others * of_states + plan.matrices_numel * request.master_itemsize
    frozen_bytes = max(0, model_bytes(plan) - numel * request.param_itemsize)
    copies = _COPIES if is_portable else 1
    return numel * _COPIES * request.master_itemsize + copies * states_bytes + frozen_bytes


def saving_bytes(plan: Plan) -> int:
    """Return the most bytes that a checkpoint and the 16-bit model take."""
    return _COPIES * (plan.trained_numel * _SAVED_ITEMSIZE + model_bytes(plan))


def lacking_bytes(plan: Plan, free_bytes: int, *, ranks: int, taken_bytes: int = 0) -> int:
    """Return the bytes that a drive lacks for saving a run beside second values; 0 if none.

    Args:
        plan: Of each of the ranks.
        free_bytes: Free on the drive, for other files.
        ranks: Ranks that share the drive.
        taken_bytes: That will be taken from it before the run is saved.
    """
    return max(0, taken_bytes + ranks * saving_bytes(plan) - free_bytes)


def wrong_guess_bytes(shapes: ModelShapes, plan: Plan) -> tuple[float, float]:
    """Return the bytes that a step reads and writes which has to be made again after backward.

    `plan` is that of steps after backward.
    """
    again, _ = optimizer_parts(begun_early(shapes, plan), 0)
    read, written = (sum(moved.values()) for moved in (plan.read_bytes, plan.written_bytes))
    return read + again.read, written + again.written


def advise_during_backward(
    shapes: ModelShapes, plan: Plan, seconds_of: Callable[[Plan], float]
) -> str:
    """Return a line about steps that may begin during backward; empty if they may not.

    `seconds_of` returns the time of a plan's step.
    """
    if not plan.request.tries_during_backward:
        return ""
    right, wrong = begun_early(shapes, plan), wrong_guess_bytes(shapes, plan)
    numel = sum(tensor.shard_numel(plan.request.world) for tensor in shapes.tensors)
    after, early = (
        [sum(moved.values()) / numel for moved in (one.read_bytes, one.written_bytes)]
        for one in (plan, right)
    )
    both = (after, early, [nbytes / numel for nbytes in wrong])
    texts = [f"reads {read:.3g} and writes {written:.3g}" for read, written in both]
    return (
        f"bytes and seconds are those of steps after backward. A run begins them during backward "
        f"(streaming.optimizer.during_backward) where its own times show that it pays, and the "
        f"drive has {format_nbytes(second_values_bytes(plan))} for second values, with "
        f"{format_nbytes(saving_bytes(plan))} left for a checkpoint. A step {texts[0]} bytes of "
        f"each parameter after backward, {texts[1]} if it begins during it "
        f"({seconds_of(right):.1f} s instead of {seconds_of(plan):.1f} s), and {texts[2]} if it "
        "then has to be made again"
    )
