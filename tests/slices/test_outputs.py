"""Outputs with logits on demand: places of stock ones, and nothing computed for others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from memascend.slices.outputs import with_logits_on_demand

LOSS, LOGITS, STATES = torch.ones(()), torch.ones(2, 3), (torch.ones(1),)
OUTPUT: type = transformers.modeling_outputs.CausalLMOutputWithPast


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def output(calls: list[str]) -> Any:
    def read() -> torch.Tensor:
        calls.append("read")
        return LOGITS

    return with_logits_on_demand(OUTPUT, {"loss": LOSS, "hidden_states": STATES}, read)


@pytest.mark.parametrize(
    "read",
    [
        lambda output: output.logits,
        lambda output: output["logits"],
        lambda output: output.get("logits"),
        lambda output: output[1],
        lambda output: output[-2],
        lambda output: output[:2][1],
        lambda output: output.to_tuple()[1],
    ],
)
def test_logits_are_computed_once_by_each_way_to_read_them(
    read: Any, output: Any, calls: list[str]
) -> None:
    assert read(output) is LOGITS
    assert read(output) is LOGITS
    assert calls == ["read"]


def test_other_values_are_read_without_them(output: Any, calls: list[str]) -> None:
    assert output[0] is output.loss is output["loss"] is output[:1][0] is LOSS
    assert output[2] is STATES
    assert "logits" in output
    assert "attentions" not in output
    assert output.get("attentions") is None
    assert output.get("absent", 7) == 7
    assert list(output.keys()) == ["loss", "hidden_states"]
    assert isinstance(output, OUTPUT)
    assert calls == []


def test_places_are_those_of_a_stock_output(output: Any) -> None:
    stock: Any = OUTPUT(loss=LOSS, logits=LOGITS, hidden_states=STATES)
    assert all(ours is theirs for ours, theirs in zip(output[:], stock[:], strict=True))
    for read in (lambda one: one[3], lambda one: one["absent"]):
        with pytest.raises((IndexError, KeyError)):
            read(output)
