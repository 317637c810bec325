"""What is compared of runs: digests of their weights and states, and numbers to the last bit."""

from __future__ import annotations

import hashlib
from typing import Any

import deepspeed
import torch
from torch import nn

from . import accessors
from .cases import Case


def weight_digests(module: nn.Module) -> dict[str, str]:
    digests = {}
    for name, parameter in module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            digests[name] = digest(parameter.data)
    return digests


def consolidated_digests(engine: Any) -> list[tuple[str, str]] | None:
    """What every way of saving the 16-bit model asks the engine for; of rank 0 alone."""
    state_dict = engine._zero3_consolidated_16bit_state_dict()
    if state_dict is None:
        return None
    return [(name, digest(tensor)) for name, tensor in state_dict.items()]


def master_digests(module: nn.Module) -> dict[str, str]:
    """fp32 master weights of a few tensors: each costs reading a sub-group with all its states."""
    named = [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]
    by_size = sorted(named, key=lambda pair: pair[1].ds_numel)
    return {
        name: digest(deepspeed.utils.safe_get_full_fp32_param(parameter))
        for name, parameter in (named[0], named[-1], by_size[0], by_size[-2])
    }


def master_values(module: nn.Module) -> dict[str, Any]:
    """All fp32 master weights, as arrays."""
    get = deepspeed.utils.safe_get_full_fp32_param
    return {name: get(one).numpy().copy() for name, one in module.named_parameters()}


def state_digests(engine: Any) -> dict[str, str]:
    """The optimizer's whole state: every parameter's tensors, and the steps that were counted."""
    digests = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            master = deepspeed.utils.safe_get_full_fp32_param(parameter)
            digests[f"{name} fp32"] = digest(master)
            for state in accessors.states_of(Case(), parameter):
                value = deepspeed.utils.safe_get_full_optimizer_state(parameter, state)
                digests[f"{name} {state}"] = digest(value)
    states = engine.optimizer.optimizer.state.values()
    digests["step"] = str({int(state["step"]) for state in states if "step" in state})
    return digests


def digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


def hexadecimal(value: Any) -> str | None:
    return None if value is None else float(value).hex()
