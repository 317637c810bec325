"""Models and optimizers that cannot be trained, refused before DeepSpeed forms sub-groups."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import distributed as dist

from memascend.deepspeed.optimizer.replaced import refuse_replaced
from memascend.deepspeed.parameters.gather import swapper_of
from memascend.errors import ConfigError
from memascend.plan.optimizer_dtypes import refusal_of_quantized

log = logging.getLogger(__name__)

#: Parameter dtypes that can be trained, besides a model that is all fp64.
_TRAINED_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
#: Of the weight of a 2-D convolution.
_CONVOLUTION_DIMENSIONS = 4
#: Methods of DeepSpeed's optimizer that need host memory for all values: why, and another way.
_CALLS = {
    "get_fp32_grad_partitions": "all gradients would be in host memory. fix: "
    "deepspeed.utils.safe_get_full_grad or safe_get_local_grad, one parameter after the other",
    "refresh_fp32_params": "it reads all 16-bit weights and writes all master weights in host "
    "memory. fix: load_checkpoint with load_module_only=True, or "
    "deepspeed.utils.safe_set_full_fp32_param for each parameter",
    "load_state_dict": "it takes all states from host memory. Nothing has changed. fix: "
    "load_checkpoint of the engine, with a folder of its save_checkpoint",
}


def refuse(module: torch.nn.Module, optimizer: Any) -> None:
    """Refuse a model and a base optimizer that DeepSpeed would fail on, or train wrongly.

    Raises:
        ConfigError: Names the reason and the fix.
    """
    refuse_several_contexts(module)
    refuse_nothing_to_train(module, optimizer)
    refuse_dtypes(optimizer)
    refuse_muon_of_torch(optimizer)
    refuse_muon_of_convolutions(module, optimizer)
    kind = type(optimizer)
    if error := refusal_of_quantized(f"{kind.__module__}.{kind.__qualname__}"):
        raise error
    refuse_replaced(optimizer)
    warn_of_modes(optimizer)


def refusal_of_call(name: str) -> ConfigError:
    """Return the error of a method of the optimizer that cannot work on a drive."""
    return ConfigError(
        f"{name}() of the optimizer cannot be combined with memascend and a device nvme: "
        f"{_CALLS[name]}"
    )


def warn_of_modes(optimizer: Any) -> None:
    """Warn of an optimizer with train() and eval(), such as a schedule-free one.

    DeepSpeed empties param_groups between steps, and calls step() for each sub-group.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if not is_first or not all(callable(getattr(optimizer, m, None)) for m in ("train", "eval")):
        return
    kind = type(optimizer)
    log.warning(
        "memascend: eval() of %s.%s changes no weight, as in CPU offload: between steps ZeRO-3 "
        "leaves param_groups empty, so evaluations and saved models have the weights of training. "
        "A count of steps in param_groups grows with each sub-group of each step. fix: name "
        '"AdamW" in the DeepSpeed JSON, or average weights as docs/limits.md, Optimizers, says',
        kind.__module__,
        kind.__qualname__,
    )


def refuse_muon_of_torch(optimizer: Any) -> None:
    """Refuse torch's Muon, which finds no matrix: ZeRO makes flat tensors of all sub-groups."""
    kind = type(optimizer)
    if kind.__name__ == "Muon" and kind.__module__.startswith("torch.optim"):
        raise ConfigError(
            "torch.optim.Muon needs whole matrices, and ZeRO-3 gives an optimizer flat tensors: "
            "DeepSpeed's CPU offload fails in its first step. Let DeepSpeed make the optimizer: "
            '"optimizer": {"type": "Muon", "params": {...}} in the JSON (DeepSpeed 0.19.8 or later)'
        )


def refuse_muon_of_convolutions(module: torch.nn.Module, optimizer: Any) -> None:
    """Refuse weights of 2-D convolutions with Muon: DeepSpeed's update has another shape.

    Experts are a batch of matrices, whatever their dimensions.
    """
    groups = [group["params"] for group in optimizer.param_groups if group.get("use_muon")]
    given = {id(param) for params in groups for param in params}
    is_muon = any("use_muon" in group for group in optimizer.param_groups)
    for name, param in module.named_parameters():
        shape = tuple(getattr(param, "ds_shape", param.shape))
        is_flattened = len(shape) == _CONVOLUTION_DIMENSIONS
        is_flattened = is_flattened and not getattr(param, "is_expert_group", False)
        # DeepSpeed goes by the parameter's own flag.
        is_given = id(param) in given or (is_muon and getattr(param, "use_muon", False))
        if is_flattened and param.requires_grad and is_given:
            raise ConfigError(
                f"Muon cannot update {name} of shape {shape}: DeepSpeed flattens its update, and "
                "its CPU offload fails in the first step. likely cause: the weight of a 2-D "
                "convolution. fix: freeze it, or make MuonWithAuxAdam in the script, where neither "
                'this parameter nor its group has use_muon, with "zero_force_ds_cpu_optimizer": '
                "false in the JSON"
            )


def refuse_several_contexts(module: torch.nn.Module) -> None:
    """Refuse parameters with several swappers: DeepSpeed passes any list of them to one."""
    swappers = {id(swapper_of(param)) for param in module.parameters() if swapper_of(param)}
    if len(swappers) > 1:
        raise ConfigError(
            f"the parameters of this model come from {len(swappers)} deepspeed.zero.Init contexts, "
            "and DeepSpeed cannot swap parameters of several contexts together. Build the whole "
            "model in one, or outside of any and let deepspeed.initialize partition it"
        )


def refuse_nothing_to_train(module: torch.nn.Module, optimizer: Any) -> None:
    """Refuse a model without sub-groups: DeepSpeed would fail to find the largest one."""
    given = [param for group in optimizer.param_groups for param in group["params"]]
    if any(param.requires_grad for param in given):
        return
    of_model = [param.requires_grad for param in module.parameters()]
    raise ConfigError(
        f"there is nothing to train: none of the {len(given)} tensors given to "
        f"{type(optimizer).__name__} requires a gradient; of the model's {len(of_model)} tensors "
        f"{sum(of_model)} do. likely cause: all weights are frozen, or adapters were added after "
        "the optimizer was made. fix: requires_grad_(True) on the parameters to train, before "
        "deepspeed.initialize, and give it those parameters; to run without training, leave the "
        "optimizer out"
    )


def refuse_dtypes(optimizer: Any) -> None:
    """Refuse dtypes that cannot be trained, also that of a frozen first parameter.

    DeepSpeed takes the dtype of all weights from the first parameter that it is given. A model that
    is entirely in fp64 is allowed.
    """
    given = [param for group in optimizer.param_groups for param in group["params"]]
    first = given[0].dtype
    trained = {param.dtype for param in given if param.requires_grad}
    if {first} | trained <= _TRAINED_DTYPES or {first} | trained == {torch.float64}:
        return
    raise ConfigError(
        f"{type(optimizer).__name__} cannot train its parameters: the first parameter is "
        f"{first}, those that require a gradient are {', '.join(sorted(map(str, trained)))}. "
        "DeepSpeed keeps all weights in the dtype of the first, and they are trained in fp32, bf16 "
        "or fp16. likely cause: frozen parameters that are no floats, such as packed 4-bit "
        "weights, were given to the optimizer. fix: model_parameters=[p for p in "
        "model.parameters() if p.requires_grad] in deepspeed.initialize; convert trained ones of "
        "another dtype to fp32 before"
    )
