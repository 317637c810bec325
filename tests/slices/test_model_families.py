"""Families that no trainer's run has: slices give the bits of micro-steps, but where a line is."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest
import torch

from tests.support.sliced_models import ROWS, batch, gradients, make, run

COUNT = 3
WHOLE = "computes the whole batch at once"
#: Weights whose gradients slices add up in another order, relative to their norm. T5's attention
#: has another kernel where its bias has no gradient, as in forward: about 20 steps of fp32.
CLOSE_REL = 64 * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Expected:
    """What of a family has not the bits of micro-steps."""

    unequal: tuple[str, ...] = ()  # beginnings of names
    whole: tuple[str, ...] = ()  # modules that the log names


FAMILIES = {
    "gemma-untied": Expected(),
    "gemma-tied": Expected(("model.embed_tokens",)),
    "phi-untied": Expected(),
    "phi3-untied": Expected(),
    "opt-untied": Expected(("lm_head",), ("the head of OPTForCausalLM",)),
    "opt-tied": Expected(("model.decoder.embed_tokens",), ("the head of OPTForCausalLM",)),
    "bert-tied": Expected(
        ("cls.predictions", "bert.embeddings.word", "bert.embeddings.position"),
        ("Embedding", "the head of BertForMaskedLM"),
    ),
    "t5-tied": Expected(("",), ("T5Block", "the head of T5ForConditionalGeneration")),
    "llava-untied": Expected(
        ("model.vision_tower", "model.multi_modal_projector"), ("Embedding", "LayerNorm")
    ),
    "gpt2-untied": Expected(("transformer.wpe",), ("Embedding",)),
    "mixtral-untied": Expected(),
    "qwen3_moe-untied": Expected(),
}
QUICK = ("gemma-tied",)


@pytest.mark.parametrize(
    "family",
    [pytest.param(one, marks=() if one in QUICK else pytest.mark.full) for one in FAMILIES],
)
def test_slices_have_the_bits_of_micro_steps(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model = make(family)
    inputs = batch(model, padded=False)
    rows, losses = ROWS // COUNT, []
    for begin in range(0, ROWS, rows):
        part = {name: value[begin : begin + rows] for name, value in inputs.items()}
        loss = model(**part).loss / COUNT
        loss.backward()
        losses.append(loss.item())
    micro = gradients(model)
    with caplog.at_level(logging.WARNING):
        found_loss, found = run(model, inputs, COUNT)
    assert found_loss == pytest.approx(sum(losses), rel=1e-6)
    assert found.keys() == micro.keys()
    expected = FAMILIES[family]
    unequal = [name for name, one in micro.items() if not torch.equal(found[name], one)]
    assert [name for name in unequal if not name.startswith(expected.unequal or ("-",))] == []
    for name in unequal:
        assert (found[name] - micro[name]).norm() <= CLOSE_REL * micro[name].norm(), name
    lines = [one for one in caplog.messages if WHOLE in one]
    assert sorted(one.split(f" {WHOLE}")[0] for one in lines) == sorted(
        f"memascend: {one}" for one in expected.whole
    )
