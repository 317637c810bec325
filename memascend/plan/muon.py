"""Muon and `gradient_clipping`, which sees updates instead of gradients: their norm is far above 1.

DeepSpeed computes Muon's updates before the norm, and puts each where its gradient was. An update
is a matrix whose singular values are all near 1, scaled by the square root of rows to columns where
there are more rows. So the norm depends on shapes alone, and a limit as small as those for
gradients divides every step by a large number, the gradients of Adam's parameters, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from memascend.base.streams import MASTER, PARAMETERS, STATE
from memascend.base.units import format_nbytes
from memascend.config.deepspeed import DeepSpeedSettings
from memascend.plan.optimizers import is_muon
from memascend.plan.request import PlanRequest
from memascend.plan.shapes import ModelShapes, TensorShape, builtin

#: Names of parameters that DeepSpeed gives to Adam, as those of fewer than two dimensions
#: (`set_optimizer_flags` in its `__init__.py`).
ADAM_KEYWORDS = ("embed", "lm_head")
#: Model whose norm is told where the model is not known.
EXAMPLE = "Llama-3.1-8B"
#: On the device, for each element of a matrix that is updated: its gradient and momentum, and the
#: temporaries of Newton-Schulz. During backward one more: the gradient stays, for an update that
#: cannot be made. Buffers of a gather, with several ranks, are fewer and gone by then.
UPDATE_VALUES = 8


def matrices_of(shapes: ModelShapes) -> list[TensorShape]:
    """Return the parameters that Muon updates: as the model says, else as DeepSpeed would."""
    return [tensor for tensor in shapes.trainable if _is_matrix(tensor)]


def _is_matrix(tensor: TensorShape) -> bool:
    by_name = not any(word in tensor.name.lower() for word in ADAM_KEYWORDS)
    is_muons = by_name if tensor.uses_muon is None else tensor.uses_muon
    return len(tensor.shape) >= 2 and is_muons


def matrix_names(shapes: ModelShapes, request: PlanRequest) -> frozenset[str]:
    """Return the names of the parameters that Muon updates; none with another optimizer."""
    found = matrices_of(shapes) if request.is_muon else ()
    return frozenset(tensor.name for tensor in found)


def matrices_numel(shapes: ModelShapes, request: PlanRequest) -> int:
    """Return the elements of one rank's parts of the matrices that are updated one by one."""
    if not request.is_muon or not request.is_tiled:
        return 0
    return sum(tensor.shard_numel(request.world) for tensor in matrices_of(shapes))


def applied_numel(shapes: ModelShapes, request: PlanRequest, in_memory: Mapping[str, int]) -> int:
    """Return the elements of a rank's matrices whose updates are applied as they are made.

    No value of their sub-groups may be in memory, which the first ones get.

    Args:
        shapes: The model.
        request: The request of the plan.
        in_memory: Elements in memory, by stream.
    """
    if not request.applies_updates:
        return 0
    return on_drive_numels(shapes, request, in_memory)[0]


def on_drive_numels(
    shapes: ModelShapes, request: PlanRequest, in_memory: Mapping[str, int]
) -> tuple[int, int]:
    """Return the elements of sub-groups of a rank that may have second values.

    Those of matrices that are updated one by one, none of whose values is in memory, and those of
    other parameters, none of whose weights and states is there. Arguments as of `applied_numel`.
    """
    if not matrices_numel(shapes, request):
        return 0, 0
    names, rest = set(), in_memory.get(PARAMETERS, 0)
    for tensor in shapes.tensors:  # in the order in which they get memory
        if rest > 0:
            names.add(tensor.name)
        rest -= tensor.shard_numel(request.world)
    kept = max(in_memory.get(MASTER, 0), in_memory.get(STATE, 0))
    matrices, begin, on_drive = matrix_names(shapes, request), 0, [0, 0]
    groups = shapes.sub_groups(
        world=request.world,
        sub_group_size=request.sub_group_size,
        has_decay_groups=request.has_decay_groups,
        matrices=matrices,
    )
    for group in groups:
        numel = sum(tensor.shard_numel(request.world) for tensor in group)
        is_of_matrices = group[0].name in matrices
        is_free = not is_of_matrices or names.isdisjoint(one.name for one in group)
        if begin >= kept and is_free:
            on_drive[0 if is_of_matrices else 1] += numel
        begin += numel
    return on_drive[0], on_drive[1]


def update_norm(matrices: Iterable[TensorShape]) -> float:
    """Return about the norm of all updates: of a batch of matrices, as experts are, each counts."""
    total = 0.0
    for tensor in matrices:
        *batch, rows, columns = tensor.shape
        total += math.prod(batch) * min(rows, columns) * max(1.0, rows / columns)
    return math.sqrt(total)


def advise_muon(shapes: ModelShapes | None, settings: DeepSpeedSettings) -> str:
    """Return a line about clipping of Muon's updates; empty if nothing is clipped, or not Muon.

    Args:
        shapes: The model; None if it is not known: the line then has the norm of an 8B.
        settings: The DeepSpeed JSON.
    """
    clipping = settings.gradient_clipping
    if not is_muon(settings.optimizer.type):
        return ""
    if "gradient_clipping" in settings.left_to_trainer:
        found = 'gradient_clipping is "auto", so a Trainer sets it to its max_grad_norm, 1.0'
        clipping = 1.0
    else:
        found = f"gradient_clipping is {clipping}"
    norm = update_norm(matrices_of(shapes or builtin(EXAMPLE)))
    if not clipping or norm <= clipping:
        return ""
    model = "this model" if shapes else f"{EXAMPLE} (memascend plan MODEL prints it for another)"
    return (
        f"{found}, and the norm of Muon's updates is about {norm:,.0f} for {model}: each step, "
        f"and the gradients of parameters that Adam steps, would be divided by about "
        f"{norm / clipping:,.0f}. Set it to 0 (max_grad_norm=0 in a Trainer), or above {norm:,.0f}"
    )


def update_bytes(shapes: ModelShapes, request: PlanRequest) -> int:
    """Return the device memory of the largest update; 0 if none is made alone."""
    if not matrices_numel(shapes, request):
        return 0
    largest = max(tensor.numel for tensor in matrices_of(shapes))
    return largest * (UPDATE_VALUES + request.during_backward) * request.gradient_itemsize


def note_device(shapes: ModelShapes, request: PlanRequest) -> str:
    """Return a line about the device memory of the largest update; empty if none is made alone."""
    if not matrices_numel(shapes, request):
        return ""
    largest = max(matrices_of(shapes), key=lambda tensor: tensor.numel)
    nbytes = update_bytes(shapes, request)
    when = "during backward" if request.during_backward else "in step()"
    return (
        f"Muon updates one matrix at a time on the device, {when}: the largest, {largest.name} of "
        f"{largest.numel:,} elements, takes about {format_nbytes(nbytes)} there"
    )
