"""A head in slices gives the loss of the whole batch, without its logits."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from memascend.errors import ConfigError
from tests.support.sliced_models import (
    IN_PROOF,
    LENGTH,
    ROWS,
    Plain,
    assert_close,
    batch,
    gradients,
    make,
    run,
    sliced,
)


def test_logits_exist_for_one_slice_until_they_are_read(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = make("llama-untied")
    inputs = batch(model)
    seen: list[int] = []
    whole = model.lm_head.forward
    model.lm_head.forward = lambda states: (seen.append(states.shape[0]), whole(states))[1]
    with sliced(model).running((), inputs, lambda _: 3):
        output = model(**inputs)
    assert seen == [2, 2, 2, *IN_PROOF]
    expected = model(**inputs).logits
    with caplog.at_level(logging.WARNING):
        assert torch.equal(output.logits, expected)
    assert f"reads its logits, torch.float32 of {tuple(expected.shape)}" in caplog.text
    assert output["logits"] is output.logits
    assert seen[6:] == [ROWS, ROWS]  # once for both readers
    with sliced(model, slices_head=False).running((), inputs, lambda _: 3):
        assert model(**inputs).logits.shape[0] == ROWS


@pytest.mark.parametrize("family", ["llama-untied", "mixtral-untied"])
def test_logits_have_the_place_of_stock_ones(family: str) -> None:
    model: Any = make(family)
    inputs = batch(model)
    if family.startswith("mixtral"):
        inputs["output_router_logits"] = True
    stock = model(**inputs)
    seen: list[int] = []
    whole = model.lm_head.forward
    model.lm_head.forward = lambda states: (seen.append(states.shape[0]), whole(states))[1]

    def fresh() -> Any:
        with sliced(model).running((), inputs, lambda _: 3):
            output = model(**inputs)
        seen.clear()
        return output

    place = list(stock.keys()).index("logits")
    for read in (
        lambda output: output[place],
        lambda output: output[place : place + 1][0],
        lambda output: output.to_tuple()[place],
        lambda output: output.get("logits"),
    ):
        torch.testing.assert_close(read(fresh()), stock.logits)
        assert seen == [ROWS]
    output = fresh()
    assert "logits" in output
    assert "hidden_states" not in output
    assert output.get("hidden_states", 7) == 7
    assert output[0] is output["loss"]
    assert torch.equal(output[0], output[:1][0])
    assert seen == [], "a reader of the loss computes no logits"
    assert list(map(type, output.to_tuple())) == list(map(type, stock.to_tuple()))
    with pytest.raises(IndexError):
        _ = output[len(stock.to_tuple())]


def test_reading_logits_changes_no_gradient() -> None:
    model: Any = make("llama-untied")
    inputs = batch(model)
    expected = run(model, inputs, 3)[1]
    with sliced(model).running((), inputs, lambda _: 3):
        output = model(**inputs)
    assert output.logits.argmax(-1).shape == inputs["labels"].shape
    output.loss.backward()
    found = gradients(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], one) for name, one in expected.items())


def test_logits_behind_a_step_are_an_error() -> None:
    """They would be those of the new weights."""
    model: Any = make("llama-untied")
    inputs, steps = batch(model), [0]
    with sliced(model, step_count=lambda: len(steps)).running((), inputs, lambda _: 3):
        output = model(**inputs)
    output.loss.backward()
    steps.append(1)
    with pytest.raises(ConfigError, match=r'read behind the step.*"head": false'):
        _ = output.logits


def test_reading_logits_takes_no_random_numbers() -> None:
    model: Any = make("llama-untied")
    model.lm_head = nn.Sequential(nn.Dropout(0.5), model.lm_head)
    inputs = batch(model)
    with sliced(model).running((), inputs, lambda _: 3):
        output = model(**inputs)
    before = torch.get_rng_state()
    assert output.logits.shape[0] == ROWS
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loss_of_logits_is_an_error_that_names_the_setting() -> None:
    model: Any = make("llama-untied")
    inputs = batch(model)
    with sliced(model).running((), inputs, lambda _: 3):
        output = model(**inputs)
    with pytest.raises(ConfigError, match='"head": false'):
        (output.loss + output.logits.square().mean()).backward()


def test_hidden_states_go_with_the_backward_pass_of_the_head() -> None:
    """Not with the loss, which lives until the end of a step."""
    model: Any = make("llama-untied")
    inputs = batch(model)
    kept: list[StorageWeakRef] = []

    def keep(module: nn.Module, arguments: Any, output: torch.Tensor) -> None:
        kept.append(StorageWeakRef(output.untyped_storage()))

    model.model.norm.register_forward_hook(keep)
    with sliced(model).running((), inputs, lambda _: 3):
        loss = model(**inputs).loss
    assert not kept[0].expired()
    loss.backward()
    assert kept[0].expired()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"labels": None}, "is not given labels"),
        ({"return_dict": False}, "return_dict=False"),
        ({"output_hidden_states": True}, "output_hidden_states"),
    ],
)
def test_a_head_that_is_asked_for_more_stays_whole(
    changes: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make("llama-untied")
    inputs = batch(model) | changes
    with caplog.at_level(logging.WARNING), sliced(model).running((), inputs, lambda _: 3):
        output = model(**inputs)
    assert reason in caplog.text
    assert ("output_hidden_states" in changes) == (
        getattr(output, "hidden_states", None) is not None
    )
    logits = output[1] if "return_dict" in changes else output.logits
    assert logits.shape[0] == ROWS


def test_a_sum_over_items_is_divided_once() -> None:
    model = make("qwen3-untied")
    inputs = batch(model) | {"num_items_in_batch": torch.tensor(77)}
    loss, expected = run(model, inputs, 0)
    found_loss, found = run(model, inputs, 4)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert_close(found, expected)


@pytest.mark.parametrize("is_given", [False, True])
def test_shifted_labels_are_those_that_are_counted(is_given: bool) -> None:
    model = make("qwen3-untied")
    inputs = batch(model, padded=False)
    shifted = nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
    shifted[0, :9] = -100
    inputs["shift_labels"] = shifted if is_given else None
    loss, expected = run(model, inputs, 0)
    found_loss, found = run(model, inputs, 4)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert_close(found, expected)


class OtherLabel(transformers.LlamaForCausalLM):
    """Its loss ignores a label of its own."""

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        keywords["ignore_index"] = 7
        return super().forward(*arguments, **keywords)


class ReadsStates(transformers.LlamaForCausalLM):
    """Its head reads the inputs of the base model."""

    def forward(self, inputs_embeds: Any = None, **keywords: Any) -> Any:
        output = super().forward(inputs_embeds=inputs_embeds, **keywords)
        assert keywords.get("labels") is None or inputs_embeds.shape[0]
        return output


class ReturnsMore(transformers.LlamaForCausalLM):
    """Its base model returns more than hidden states."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        whole = self.model.forward
        self.model.forward = lambda *arguments, **keywords: More(
            last_hidden_state=whole(*arguments, **keywords).last_hidden_state,
            pooled=torch.ones(1),
        )


class CallsTwice(transformers.LlamaForCausalLM):
    """Compares the logits of its inputs with those of others."""

    def forward(self, inputs_embeds: Any = None, labels: Any = None, **keywords: Any) -> Any:
        first = self.model(inputs_embeds=inputs_embeds, **keywords).last_hidden_state
        halved = None if inputs_embeds is None else inputs_embeds / 2
        other = self.model(inputs_embeds=halved, **keywords).last_hidden_state
        logits = self.lm_head(first) - self.lm_head(other) / 2
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=32)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


class Catches(transformers.LlamaForCausalLM):
    """Has another way of its own if its base model fails."""

    caught: Any = Exception

    def forward(self, labels: Any = None, **keywords: Any) -> Any:
        try:
            states = self.model(**keywords).last_hidden_state
        except self.caught:
            states = keywords["inputs_embeds"]
        logits = self.lm_head(states)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=32)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


class CatchesAll(Catches):
    """Even that a process is to end."""

    caught = BaseException


class CatchesLater(Catches):
    """Calls its base model twice, if that works."""

    def forward(self, labels: Any = None, **keywords: Any) -> Any:
        states = self.model(**keywords).last_hidden_state
        with contextlib.suppress(Exception):
            states = self.model(inputs_embeds=states).last_hidden_state
        logits = self.lm_head(states)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=32)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


class KeepsLosses(transformers.LlamaForCausalLM):
    """Keeps its losses, for the log of a script."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.losses: list[torch.Tensor] = []

    def forward(self, **keywords: Any) -> Any:
        output = super().forward(**keywords)
        self.losses.append(output.loss.detach())
        return output


class ReadsOtherStates(transformers.LlamaForCausalLM):
    """Makes other inputs of its own, which slices do not have."""

    def forward(self, inputs_embeds: Any = None, **keywords: Any) -> Any:
        output = super().forward(inputs_embeds=inputs_embeds, **keywords)
        other = self.model(inputs_embeds=inputs_embeds.tanh()).last_hidden_state
        output.loss = output.loss + self.lm_head(other).square().mean()
        return output


class AddsToLogits(transformers.LlamaForCausalLM):
    """Uses an argument behind its base model, that has the name of images."""

    def forward(self, labels: Any = None, image_bias: Any = None, **keywords: Any) -> Any:
        image_bias = torch.arange(32.0) if image_bias is None else image_bias
        output = super().forward(**keywords)
        output.logits = output.logits + image_bias
        output.loss = self.loss_function(logits=output.logits, labels=labels, vocab_size=32)
        return output


@dataclass
class Measured(transformers.modeling_outputs.CausalLMOutput):
    """With a value of its own."""

    accuracy: torch.Tensor | None = None


class Measures(transformers.LlamaForCausalLM):
    """Returns more than a loss and logits."""

    def forward(self, **keywords: Any) -> Any:
        output = super().forward(**keywords)
        accuracy = (output.logits.argmax(-1) == keywords["labels"]).float().mean()
        return Measured(loss=output.loss, logits=output.logits, accuracy=accuracy)


class AddsToLoss(transformers.LlamaForCausalLM):
    """Adds to its loss in place, as mixtures of experts do."""

    def forward(self, **keywords: Any) -> Any:
        output = super().forward(**keywords)
        output.loss += self.lm_head.weight.square().mean()
        return output


@dataclass
class More(transformers.utils.ModelOutput):
    """What that one returns."""

    last_hidden_state: torch.Tensor | None = None
    pooled: torch.Tensor | None = None
    past_key_values: Any = None
    hidden_states: Any = None
    attentions: Any = None


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (OtherLabel, "ignores the label 7"),
        (ReadsStates, "more than hidden states: 'NoneType'"),
        (ReturnsMore, "also returns pooled"),
        (AddsToLoss, "its loss is more than that of its loss function"),
        (CallsTwice, "its forward calls model several times"),
        (CatchesLater, "its forward calls model several times"),
        (Catches, ""),
        (CatchesAll, ""),
        (KeepsLosses, "its attribute losses keeps a value of the call"),
        (ReadsOtherStates, "more than hidden states: 'NoneType'"),
        (AddsToLogits, "image_bias may be used behind its base model"),
        (Measures, "it also returns accuracy"),
    ],
)
def test_a_head_that_uses_more_stays_whole(
    made: type[Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    config.vocab_size, config.use_cache = 32, False
    model = made(config).train()
    model.gradient_checkpointing_enable()
    ids = torch.randint(1, 30, (ROWS, 4))
    labels = ids.clone()
    labels[0] = 7
    inputs = {"inputs_embeds": model.get_input_embeddings()(ids).detach(), "labels": labels}
    if made is AddsToLogits:
        inputs["image_bias"] = torch.randn(32)
    loss, expected = run(model, inputs, 0)
    with caplog.at_level(logging.WARNING):
        found_loss, found = run(model, inputs, 3)
    assert reason in caplog.text
    assert bool(caplog.text) == bool(reason)
    assert [one.item() for one in getattr(model, "losses", [])] in ([], [loss, found_loss])
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert_close(found, expected)


def test_a_hook_on_the_head_sees_all_logits(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = make("llama-untied")
    inputs = batch(model)
    seen: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda *call: seen.append(call[2]))
    with sliced(model).running((), inputs, lambda _: 3):
        model(**inputs)
    assert "has a hook, " in caplog.text
    assert [(len(one), one.requires_grad) for one in seen] == [(ROWS, True)]


def test_a_model_without_a_known_head_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Plain(reentrant=False)
    ids = torch.randint(50, (ROWS, LENGTH))
    runs = sliced(model)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with runs.running((ids,), {}, lambda _: 3):
                model(ids)
    assert caplog.text.count("the head of Plain computes the whole batch at once: it is none") == 1
    caplog.clear()
    with sliced(model, slices_head=False).running((ids,), {}, lambda _: 3):
        model(ids)
    assert caplog.text == ""
