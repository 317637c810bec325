"""Optimizers that accelerate replaces: quantized ones are refused, others named once."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from memascend.deepspeed.optimizer import refusals, replaced
from memascend.errors import ConfigError

accelerate = pytest.importorskip("accelerate.utils.deepspeed")
pytestmark = pytest.mark.deepspeed
MODEL = torch.nn.Linear(2, 2)


@pytest.fixture(autouse=True)
def without_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import takes seconds, and our classes are none of its own."""
    monkeypatch.setattr(accelerate, "is_bnb_available", lambda *_, **__: False)


def made_by_accelerate(
    kind: type[torch.optim.Optimizer], *, decay: float = 0.0, **attributes: Any
) -> Any:
    """The optimizer that accelerate makes of one of a class."""
    optimizer = kind(MODEL.parameters(), lr=1e-3, weight_decay=decay)  # type: ignore[call-arg]
    optimizer.param_groups[0].update(attributes.pop("options", {}))
    vars(optimizer).update(attributes)
    return replaced.wrap_map(accelerate.map_pytorch_optim_to_deepspeed)(optimizer)


def kind_of(module: str, name: str, base: type = torch.optim.SGD) -> type[torch.optim.Optimizer]:
    return type(name, (base,), {"__module__": module})


@pytest.mark.parametrize("attributes", [{}, {"args": SimpleNamespace(optim_bits=8)}])
@pytest.mark.parametrize(
    "kind",
    [
        kind_of("bitsandbytes.optim.adamw", "AdamW8bit"),
        # Of either number of bits: `args` has it.
        kind_of("bitsandbytes.optim.adamw", "AdamW"),
        kind_of("bitsandbytes.optim.adam", "Adam"),
        kind_of("torchao.optim.adam", "AdamW4bit"),
        kind_of("bitsandbytes.optim.adamw", "PagedAdamW8bit"),
    ],
)
def test_one_with_quantized_states_is_refused_and_the_key_named(
    kind: type[torch.optim.Optimizer], attributes: dict[str, Any]
) -> None:
    """accelerate makes DeepSpeedCPUAdam of it, with states in fp32, and says nothing."""
    made = made_by_accelerate(kind, **attributes)
    assert type(made).__name__ == "DeepSpeedCPUAdam"
    assert not made.adam_w_mode
    told = rf"{kind.__module__}\.{kind.__name__} keeps quantized .*state_dtype to \"int8"
    with pytest.raises(ConfigError, match=told):
        refusals.refuse(MODEL, made)


CPU_ADAM = kind_of("deepspeed.ops.adam.cpu_adam", "DeepSpeedCPUAdam")
FUSED_ADAM = kind_of("deepspeed.ops.adam.fused_adam", "FusedAdam")


@pytest.mark.parametrize(
    ("kind", "attributes"),
    [
        (kind_of("transformers.optimization", "Adafactor"), {}),
        (kind_of("deepspeed.runtime.zero.muon.muon_optimizer", "MuonWithAuxAdam"), {}),
        (kind_of("bitsandbytes.optim.adamw", "PagedAdamW32bit"), {"optim_bits": 32, "decay": 0.1}),
        (CPU_ADAM, {"adam_w_mode": True, "decay": 0.1}),
        (kind_of("scripts", "AdamW", torch.optim.AdamW), {}),
        (torch.optim.AdamW, {"options": {"maximize": True}}),
        (torch.optim.Adam, {"options": {"decoupled_weight_decay": True}, "decay": 0.1}),
    ],
)
def test_another_kind_is_named_with_what_keeps_it(
    kind: type[torch.optim.Optimizer],
    attributes: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = made_by_accelerate(kind, **attributes)
    with caplog.at_level(logging.WARNING):
        refusals.refuse(MODEL, made)
    assert f"{kind.__module__}.{kind.__name__} by DeepSpeedCPUAdam" in caplog.text
    assert "zero_force_ds_cpu_optimizer" in caplog.text
    assert ("decay added to gradients" in caplog.text) != made.adam_w_mode


@pytest.mark.parametrize(
    ("kind", "attributes"),
    [
        (torch.optim.AdamW, {"decay": 0.1}),
        (torch.optim.Adam, {"decay": 0.1}),
        (kind_of("bitsandbytes.optim.adam", "Adam32bit"), {"optim_bits": 32, "decay": 0.1}),
        (kind_of("bitsandbytes.optim.adamw", "PagedAdamW32bit"), {"optim_bits": 32}),
        (kind_of("bitsandbytes.optim.adamw", "AdamW"), {"args": SimpleNamespace(optim_bits=32)}),
        (CPU_ADAM, {"adam_w_mode": False, "decay": 0.1}),
        (CPU_ADAM, {"adam_w_mode": True}),
        (FUSED_ADAM, {"adam_w_mode": 1}),
    ],
)
def test_one_that_is_replaced_by_its_equal_is_not_named(
    kind: type[torch.optim.Optimizer],
    attributes: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        refusals.refuse(MODEL, made_by_accelerate(kind, **attributes))
    assert "accelerate replaced" not in caplog.text
