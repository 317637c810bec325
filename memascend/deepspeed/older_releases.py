"""The newest DeepSpeed's surface for older supported releases: all that differs between them.

Each function looks for the capability itself, never at a version number. The text of each gives the
release that changed it. `upstream.py` gives DeepSpeed's optimizer object as `stage3`. Fingerprints
were compared before: a name that is missing here is missing in a known release.
"""

# DeepSpeed's objects have no types.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero import utils
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

# -- the optimizer object ------------------------------------------------------------------------


def partition_rank(stage3: Any, param: Any) -> int:
    """Return the number of this rank's part of a parameter; one group for all before 0.19.3."""
    if hasattr(stage3, "_get_param_partition_rank"):
        return stage3._get_param_partition_rank(param)
    return dist.get_rank(group=stage3.dp_process_group)


def is_boundary(stage3: Any) -> bool:
    """Return whether a step follows this micro-step: a method since 0.19.5, an attribute before."""
    known = stage3.is_gradient_accumulation_boundary
    return known() if callable(known) else known


def note_reduced(stage3: Any, param: Any) -> None:
    """Note that a parameter got a gradient since the last step.

    Only since 0.19.5 a script may state the end of a window after its last backward pass.
    """
    if hasattr(stage3, "_offload_boundary_param_ids"):
        stage3._offload_boundary_param_ids.add(param.ds_id)


def arriving_dtype(stage3: Any, param: Any) -> torch.dtype:
    """Return the dtype that a gradient was last rounded to when it is stored.

    It is the dtype of the reduction. Before 0.19.2 the model's: gradients were rounded to it after
    the reduction, not widened to the dtype that they are added up in.
    """
    scatter = DeepSpeedZeroOptimizer_Stage3._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads
    widens = _reads(scatter, "gradient_accumulation_dtype")
    return stage3.get_param_comm_dtype(param) if widens else stage3.dtype


@functools.cache
def _reads(function: Any, name: str) -> bool:
    """Return whether the code of a function, or of one that it decorates, reads an attribute."""
    inner = [cell.cell_contents for cell in function.__closure__ or ()]
    return name in function.__code__.co_names or any(
        _reads(one, name) for one in inner if inspect.isfunction(one)
    )


def uses_muon(stage3: Any) -> bool:
    """Return whether the base optimizer is DeepSpeed's Muon; in stage 3 since 0.18.9."""
    return getattr(stage3, "use_muon", False)


def hears_of_forward(stage3: Any) -> bool:
    """Return whether DeepSpeed calls `clear_backward_seen_flag` in each forward: since 0.18.5."""
    return hasattr(stage3, "_epilogue_ran_this_backward")


def begin_forward(stage3: Any) -> None:
    """Tell our optimizer that a forward pass begins, if DeepSpeed does not."""
    if hasattr(stage3, "clear_backward_seen_flag") and not hears_of_forward(stage3):
        stage3.clear_backward_seen_flag()


def continue_micro_step(stage3: Any) -> None:
    """Note that the reduction that has just ended does not end the micro-step.

    DeepSpeed counts a micro-step in the forward pass after it, before 0.18.5 in the reduction.
    """
    if hears_of_forward(stage3):
        stage3._epilogue_ran_this_backward = False
    else:
        stage3.micro_step_id -= 1


def end_backward_graphs(stage3: Any) -> None:
    """Forget graphs that an error aborted: the next pass would not be reduced at its end."""
    stage3._backward_active_depth = 0
    if not hears_of_forward(stage3):  # later releases count the hooks anew in each forward pass
        stage3._remaining_grad_acc_hooks = 0


def clear_bucket(bucket: Any) -> None:
    """Drop the gradients that wait in a bucket, and keep its buffer; a method since 0.18.5."""
    if hasattr(bucket, "clear_params"):
        bucket.clear_params()
    else:
        bucket.params.clear()
        bucket.elements = 0


# -- parameters, norms, engines --------------------------------------------------------------------


def rank_of_part(param: Any) -> int:
    """Return the number of this rank's part of a parameter: an attribute since 0.19.3."""
    if hasattr(param, "ds_zero_partition_rank"):
        return param.ds_zero_partition_rank
    return dist.get_rank(group=param.ds_process_group)


def norm_dtype() -> torch.dtype:
    """Return the dtype of gradient norms: the accelerator's since 0.19.6, fp64 before."""
    return utils.get_norm_dtype() if hasattr(utils, "get_norm_dtype") else torch.float64


def model_parallel_rank(engine: Any) -> int:
    """Return the number of a model-parallel rank in names of files; an attribute since 0.19.6."""
    if hasattr(engine, "checkpoint_mp_rank"):
        return engine.checkpoint_mp_rank
    return 0 if engine.mpu is None else engine.mpu.get_model_parallel_rank()
