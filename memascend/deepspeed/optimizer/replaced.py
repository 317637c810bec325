"""Optimizers of a script that accelerate replaces by DeepSpeed's, as it does with offload.

accelerate takes DeepSpeedCPUAdam for every class but a few, with states in fp32, and without
decoupled weight decay unless the script's is an AdamW. It says nothing.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import distributed as dist

from memascend.plan.optimizer_dtypes import refusal_of_quantized

log = logging.getLogger(__name__)

#: Name of our note in an optimizer that accelerate made.
_NOTE = "memascend_replaced"
#: Classes whose steps are those of Adam, with decoupled weight decay or without.
_ADAMS = {
    "torch.optim.adam.Adam",
    "torch.optim.adamw.AdamW",
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam",
    "deepspeed.ops.adam.fused_adam.FusedAdam",
    *(
        f"bitsandbytes.optim.{name.lower()}.{paged}{name}{bits}"
        for name in ("Adam", "AdamW")
        for paged in ("", "Paged")
        for bits in ("", "32bit")
    ),
}
#: Options of a group that change Adam's steps, and that accelerate drops.
_DROPPED = ("amsgrad", "maximize")


class _Replaced(NamedTuple):
    name: str  # of the script's class, with its module
    has_wide_states: bool  # of 32 bits, as far as it tells
    is_same: bool  # whether the new one makes the same steps


def wrap_map(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return accelerate's function, which notes the replaced class in the new optimizer."""

    @functools.wraps(original)
    def replace(optimizer: Any, *arguments: Any, **keywords: Any) -> Any:
        made = original(optimizer, *arguments, **keywords)
        vars(made)[_NOTE] = _compare(optimizer, made)
        return made

    replace.__memascend__ = True  # type: ignore[attr-defined]
    return replace


def refuse_replaced(optimizer: Any) -> None:
    """Refuse an optimizer that replaces one with quantized states; warn if it replaces another.

    Raises:
        ConfigError: The script's had quantized states, and this one has them in fp32.
    """
    replaced = vars(optimizer).get(_NOTE)
    if replaced is None:
        return
    if not replaced.has_wide_states and (error := refusal_of_quantized(replaced.name)):
        raise error
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if not replaced.is_same and is_first:
        decay = "" if optimizer.adam_w_mode else " with weight decay added to gradients"
        log.warning(
            "memascend: accelerate replaced the script's %s by DeepSpeedCPUAdam, whose steps are "
            "Adam's%s, as it does with offload_optimizer. fix: name the optimizer in the DeepSpeed "
            'JSON ("optimizer": {"type": "AdamW", "params": {...}}; without the Trainer, pass '
            "accelerate.utils.DummyOptim instead of one), or set "
            '"zero_force_ds_cpu_optimizer" to false there to keep the script\'s',
            replaced.name,
            decay,
        )


def _compare(optimizer: Any, made: Any) -> _Replaced:
    kind = type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    # accelerate reads the bits of bitsandbytes' optimizers at the same two places.
    bits = getattr(optimizer, "optim_bits", None) or getattr(
        getattr(optimizer, "args", None), "optim_bits", None
    )
    # Adagrad and Lion replace their equals alone.
    is_same = type(made).__name__ != "DeepSpeedCPUAdam" or _is_equal_adam(optimizer, name, made)
    return _Replaced(name, bits == 32, is_same)


def _is_equal_adam(optimizer: Any, name: str, made: Any) -> bool:
    groups = optimizer.param_groups
    if name not in _ADAMS or any(group.get(one) for group in groups for one in _DROPPED):
        return False
    is_decoupled = getattr(optimizer, "adam_w_mode", "AdamW" in name)
    is_decoupled = groups[0].get("decoupled_weight_decay", is_decoupled)
    has_decay = any(group.get("weight_decay") for group in groups)
    return not has_decay or bool(is_decoupled) == made.adam_w_mode
