"""Optimizers of a script that accelerate replaces by DeepSpeed's, as it does with offload.

accelerate takes DeepSpeedCPUAdam for every class but a few, with states in fp32, and without
decoupled weight decay unless the script's is an AdamW. It says nothing.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from deepspeed import comm as dist

from memascend.plan.optimizer_dtypes import refusal_of_quantized

log = logging.getLogger(__name__)

#: Name of our note in an optimizer that accelerate made.
_NOTE = "memascend_replaced"
#: Classes of Adam without decoupled weight decay, which DeepSpeedCPUAdam has without `adamw_mode`.
_PLAIN_ADAMS = ("torch.optim.adam.Adam", "bitsandbytes.optim.adam.Adam")


class _Replaced(NamedTuple):
    name: str  # of the script's class, with its module
    has_wide_states: bool  # of 32 bits, as far as it tells
    is_same: bool  # whether the new one makes the same steps


def wrap_map(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return accelerate's function, which notes the replaced class in the new optimizer."""

    @functools.wraps(original)
    def replace(optimizer: Any) -> Any:
        made = original(optimizer)
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
        log.warning(
            "memascend: accelerate replaced the script's %s by DeepSpeedCPUAdam, whose steps are "
            "Adam's with weight decay added to gradients, as it does with offload_optimizer. fix: "
            'name the optimizer in the DeepSpeed JSON ("optimizer": {"type": "AdamW", "params": '
            '{...}}), or set "zero_force_ds_cpu_optimizer" to false there to keep the script\'s',
            replaced.name,
        )


def _compare(optimizer: Any, made: Any) -> _Replaced:
    kind = type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    # accelerate reads the bits of bitsandbytes' optimizers at the same two places.
    bits = getattr(optimizer, "optim_bits", None) or getattr(
        getattr(optimizer, "args", None), "optim_bits", None
    )
    # Adagrad and Lion replace their equals alone; `adam_w_mode` is on for an AdamW alone.
    is_same = (
        type(made).__name__ != "DeepSpeedCPUAdam"
        or made.adam_w_mode
        or name.removesuffix("32bit") in _PLAIN_ADAMS
        or not getattr(optimizer, "adam_w_mode", True)
    )
    return _Replaced(name, bits == 32, is_same)
