"""Models and optimizers that are refused before DeepSpeed forms sub-groups."""

from __future__ import annotations

import logging

import pytest
import torch

pytest.importorskip("deepspeed")

from memascend.deepspeed.optimizer import refusals
from memascend.deepspeed.optimizer.optimizer import ZeroOptimizer
from memascend.deepspeed.parameters.swapper import ParameterSwapper
from memascend.errors import ConfigError


def test_a_model_from_several_contexts_is_refused() -> None:
    """DeepSpeed gives mixed lists to the first parameter's swapper: the others would not train."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    first, second = (ParameterSwapper.__new__(ParameterSwapper) for _ in range(2))
    for param in model.parameters():
        param.nvme_swapper = first  # type: ignore[attr-defined]
    refusals.refuse_several_contexts(model)
    for param in model[1].parameters():
        param.nvme_swapper = second  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"2 deepspeed\.zero\.Init contexts"):
        refusals.refuse_several_contexts(model)


def test_a_model_without_a_trainable_parameter_is_refused() -> None:
    """DeepSpeed fails with "max() arg is an empty sequence"."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model[0].parameters())
    model[0].weight.requires_grad_(False)
    refusals.refuse_nothing_to_train(model, optimizer)
    model[0].bias.requires_grad_(False)
    told = r"none of the 2 tensors given to AdamW .* of the model's 4 tensors 2 do.*fix: "
    with pytest.raises(ConfigError, match=told):
        ZeroOptimizer(model, optimizer, {}, None, {"memascend": {}})


@pytest.mark.parametrize("module", ["bitsandbytes.optim.adamw", "torchao.optim.adam"])
@pytest.mark.parametrize("name", ["AdamW8bit", "PagedAdamW8bit", "AdamW4bit"])
def test_an_optimizer_with_8_bit_states_of_its_own_is_refused_and_ours_named(
    module: str, name: str
) -> None:
    """DeepSpeed lets such a class pass with "zero_force_ds_cpu_optimizer": false."""
    model = torch.nn.Linear(2, 2)
    kind = type(name, (torch.optim.AdamW,), {"__module__": module})
    with pytest.raises(
        ConfigError, match=rf"{module}\.{name} keeps quantized .*state_dtype to \"int8"
    ):
        ZeroOptimizer(model, kind(model.parameters()), {}, None, {"memascend": {}})
    refusals.refuse(model, torch.optim.AdamW(model.parameters()))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_torchs_muon_is_refused_and_deepspeeds_named() -> None:
    model = torch.nn.Linear(2, 2, bias=False)
    with pytest.raises(ConfigError, match=r'torch\.optim\.Muon needs .*"type": "Muon"'):
        refusals.refuse(model, torch.optim.Muon(model.parameters()))


@pytest.mark.parametrize("modes", [(), ("eval",), ("train", "eval")])
def test_an_optimizer_whose_eval_changes_weights_elsewhere_is_named(
    modes: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """A schedule-free one: DeepSpeed has no parameter in its groups between steps."""
    model = torch.nn.Linear(2, 2)
    methods = {mode: lambda self: None for mode in modes}
    kind = type("AdamWScheduleFree", (torch.optim.AdamW,), {"__module__": "schedulefree"} | methods)
    with caplog.at_level(logging.WARNING):
        refusals.refuse(model, kind(model.parameters()))
    told = "eval() of schedulefree.AdamWScheduleFree changes no weight" in caplog.text
    assert told == (len(modes) == 2)
    assert ("with each sub-group of each step. fix: " in caplog.text) == told


def test_a_convolution_that_muon_would_update_is_refused_by_name() -> None:
    """DeepSpeed's function flattens it, and fails in the first step."""
    from deepspeed.runtime.zero.muon.original_muon import muon_update

    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 4, bias=False), torch.nn.Linear(2, 2))
    weight, *others = model.parameters()
    with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match="size"):
        muon_update(torch.ones_like(weight), torch.zeros_like(weight))
    groups = [{"params": [weight], "use_muon": True}, {"params": others, "use_muon": False}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    with pytest.raises(ConfigError, match=r"0\.weight of shape \(3, 2, 4, 4\).*fix: freeze it"):
        refusals.refuse(model, optimizer)
    optimizer.param_groups[0]["use_muon"] = False
    refusals.refuse(model, optimizer)
    weight.use_muon = True  # type: ignore[attr-defined]  # this flag is DeepSpeed's
    with pytest.raises(ConfigError, match="neither this parameter nor its group has use_muon"):
        refusals.refuse(model, optimizer)
    optimizer.param_groups[0]["use_muon"] = weight.is_expert_group = True  # type: ignore[attr-defined]
    refusals.refuse(model, optimizer)


@pytest.mark.parametrize("kind", ["int8", "int64", "bool", "float8_e4m3fn", "complex64"])
def test_a_first_parameter_that_cannot_be_trained_is_refused(kind: str) -> None:
    """DeepSpeed would keep all weights in its dtype; CPU offload ends in an error of torch's."""
    packed = torch.nn.Parameter(torch.zeros(8).to(getattr(torch, kind)), requires_grad=False)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([*model.parameters(), packed])
    refusals.refuse_dtypes(optimizer)
    optimizer = torch.optim.AdamW([packed, *model.parameters()])
    told = rf"first parameter is torch\.{kind}, .* are torch\.float32.*fix: model_parameters=\[p"
    with pytest.raises(ConfigError, match=told):
        ZeroOptimizer(model, optimizer, {}, None, {"memascend": {}})


def test_a_part_in_double_precision_is_refused_and_a_whole_model_is_not() -> None:
    """A tile has no room to cast to a second dtype."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).double())
    with pytest.raises(ConfigError, match=r"are torch\.float32, torch\.float64"):
        refusals.refuse_dtypes(torch.optim.AdamW(model.parameters()))
    refusals.refuse_dtypes(torch.optim.AdamW(model.double().parameters()))
