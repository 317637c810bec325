"""Table of known optimizers: which step element by element, and their initial states.

An elementwise optimizer updates each element from that element's own weight, gradient and state, so
a sub-group may be stepped tile by tile. All others (LAMB, Adafactor, and those not listed) need the
whole sub-group: they use whole tensors, or keep a running number per tensor that every tile would
advance (NAdam). Muon is elementwise once its updates are made, matrix by matrix, before the walk.
Pure data: no torch, no DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerKind:
    """Facts of one optimizer."""

    states: int  # tensors of state per parameter
    options: tuple[str, ...] = ()  # options that add one more tensor of state each when set
    is_elementwise: bool = True  # whether it may be stepped in tiles
    #: Names of its initial states, each filled with one value; empty if the optimizer must create
    #: them itself.
    start: tuple[str, ...] = ()


#: Adam's first moment.
FIRST_MOMENT = "exp_avg"
_MOMENTS = (FIRST_MOMENT, "exp_avg_sq")
#: Muon's state, which tiles do not have; its other parameters have Adam's.
MOMENTUM = "momentum_buffer"
#: By name in a DeepSpeed JSON, or name of the class, in lower case.
_KINDS = {
    "adam": OptimizerKind(states=2, options=("amsgrad",), start=_MOMENTS),
    "adamw": OptimizerKind(states=2, options=("amsgrad",), start=_MOMENTS),
    "deepspeedcpuadam": OptimizerKind(states=2, start=_MOMENTS),
    "fusedadam": OptimizerKind(states=2),
    "adamax": OptimizerKind(states=2),
    "radam": OptimizerKind(states=2),
    "adadelta": OptimizerKind(states=2),
    # DeepSpeed's CPU version keeps a second state that it never uses.
    "lion": OptimizerKind(states=2, start=_MOMENTS),
    "deepspeedcpulion": OptimizerKind(states=2, start=_MOMENTS),
    "fusedlion": OptimizerKind(states=1),
    "adagrad": OptimizerKind(states=1, start=("sum",)),
    "deepspeedcpuadagrad": OptimizerKind(states=1, start=("exp_avg_sq",)),
    "rmsprop": OptimizerKind(states=1, options=("momentum", "centered")),
    "sgd": OptimizerKind(states=0, options=("momentum",)),
    "lamb": OptimizerKind(states=2, is_elementwise=False),
    "fusedlamb": OptimizerKind(states=2, is_elementwise=False),
    "muon": OptimizerKind(states=2, start=_MOMENTS),
    "muonwithauxadam": OptimizerKind(states=2, start=_MOMENTS),
    # Not two: ZeRO's tensors are flat, so that no second moment is factored.
    "adafactor": OptimizerKind(states=1, options=("beta1",), is_elementwise=False),
    "nadam": OptimizerKind(states=2, is_elementwise=False),
}
_UNKNOWN = OptimizerKind(states=2, options=("amsgrad",), is_elementwise=False)


def is_muon(optimizer: str) -> bool:
    """Return whether an optimizer, by name, is DeepSpeed's Muon."""
    return optimizer.lower() in ("muon", "muonwithauxadam")


def kind_of(optimizer: str) -> OptimizerKind:
    """Return the facts of an optimizer by name; an unknown one steps whole sub-groups."""
    return _KINDS.get(optimizer.lower(), _UNKNOWN)


def state_count_of(optimizer: str, options: Mapping[str, Any] | None = None) -> int:
    """Return the number of state tensors per parameter; momentum and the like may add one."""
    kind = kind_of(optimizer)
    return kind.states + sum(bool((options or {}).get(option)) for option in kind.options)
