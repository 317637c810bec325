"""Shares of a loss add up to that of the whole batch, or a head stays whole."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.loss import loss_utils
from transformers.modeling_outputs import CausalLMOutput

from tests.support.sliced_models import LENGTH, ROWS, assert_close, run, sliced

VOCABULARY = 32
POSITIONS = torch.arange(LENGTH // 4).repeat(4)[None]


class Own(transformers.LlamaForCausalLM):
    """Does more with its logits."""

    def forward(self, labels: Any = None, **keywords: Any) -> Any:
        states = self.model(**keywords).last_hidden_state
        logits = self.more(self.lm_head(states), keywords)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=VOCABULARY, **keywords)
        return CausalLMOutput(loss=loss, logits=logits)

    def more(self, logits: torch.Tensor, keywords: dict[str, Any]) -> torch.Tensor:
        return torch.tanh(logits / 3) * 3


class Centred(Own):
    """Has logits of which the mean over sequences is zero."""

    def more(self, logits: torch.Tensor, keywords: dict[str, Any]) -> torch.Tensor:
        return logits - logits.mean(0, keepdim=True)


class Scaled(Own):
    """Has logits of one variance."""

    def more(self, logits: torch.Tensor, keywords: dict[str, Any]) -> torch.Tensor:
        return logits / logits[..., :1].std()


class Smoothed(Own):
    """Mixes the logits of neighbouring tokens."""

    def more(self, logits: torch.Tensor, keywords: dict[str, Any]) -> torch.Tensor:
        return logits + nn.functional.pad(logits[:, :-1], (0, 0, 1, 0))


class Copies(Own):
    """Has a bias for the tokens that it is given."""

    def more(self, logits: torch.Tensor, keywords: dict[str, Any]) -> torch.Tensor:
        ids = keywords.get("input_ids")
        return logits if ids is None else logits + nn.functional.one_hot(ids, VOCABULARY)


class Noisy(Own):
    """Takes random numbers."""

    def more(self, logits: torch.Tensor, keywords: dict[str, Any]) -> torch.Tensor:
        return nn.functional.dropout(logits, 0.5)


def make(made: type[Any]) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    config.vocab_size, config.use_cache = VOCABULARY, False
    model = made(config).train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def rows(count: int = ROWS) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, VOCABULARY, (count, LENGTH))
    labels = ids.clone()
    labels[::2, :5] = -100
    return {"input_ids": ids, "labels": labels}


def compare(model: Any, inputs: dict[str, Any], count: int, caplog: Any) -> None:
    """Train the model in slices, keeping warnings, and whole: losses and gradients are the same."""
    loss, expected = run(model, inputs, 0)
    runs = sliced(model)
    for _ in range(2):  # the second pass knows the reason
        with caplog.at_level(logging.WARNING), runs.running((), inputs, lambda _: count):
            found = model(**inputs).loss
        found.backward()
        gradients = {name: param.grad for name, param in model.named_parameters()}
        model.zero_grad()
        assert found.item() == pytest.approx(loss, rel=1e-6)
        assert_close(gradients, expected)


@pytest.mark.parametrize("count", [ROWS, 2, 4])
@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (Own, ""),
        (Copies, ""),
        (Smoothed, ""),
        (Centred, "its output for a sequence depends on other sequences"),
        (Scaled, "its output for a sequence depends on other sequences"),
    ],
)
def test_logits_of_a_sequence_that_depend_on_others_keep_a_head_whole(
    made: Any, reason: str, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    compare(make(made), rows(), count, caplog)
    assert reason in caplog.text
    assert bool(reason) == ("memascend: " in caplog.text)
    assert caplog.text.count("memascend: ") == bool(reason)


@pytest.mark.parametrize(("made", "reason"), [(Own, ""), (Smoothed, "depends on other")])
def test_logits_of_a_packed_row_that_depend_on_other_tokens_keep_a_head_whole(
    made: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    compare(make(made), rows(1) | {"position_ids": POSITIONS}, 4, caplog)
    assert reason in caplog.text
    assert bool(reason) == ("memascend: " in caplog.text)


def weighted(source: torch.Tensor, target: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """The mean by weights of classes, whatever the number of items."""
    weights = torch.linspace(0.1, 2, source.shape[-1])
    return nn.functional.cross_entropy(source, target, weight=weights)


def summed(source: torch.Tensor, target: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(source, target, label_smoothing=0.1, reduction="sum")


@pytest.mark.parametrize("items", [None, torch.tensor(50)])
@pytest.mark.parametrize(("entropy", "is_sum"), [(weighted, False), (summed, True)])
def test_a_cross_entropy_that_is_no_sum_keeps_a_head_whole(
    entropy: Any,
    is_sum: bool,
    items: torch.Tensor | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A library has put it in the place of that of transformers."""
    monkeypatch.setattr(loss_utils, "fixed_cross_entropy", entropy)
    for count in (ROWS, 2):
        caplog.clear()
        compare(make(Own), rows() | {"num_items_in_batch": items}, count, caplog)
        assert ("its loss is no sum over sequences" in caplog.text) == (not is_sum)


def test_a_loss_of_zero_proves_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_utils, "fixed_cross_entropy", weighted)
    model, inputs = make(Own), rows()
    runs, ignored = sliced(model), inputs["labels"].clone()
    ignored[:2] = -100
    for labels, is_whole in ((ignored, False), (inputs["labels"], True)):
        monkeypatch.setattr(loss_utils, "fixed_cross_entropy", weighted if is_whole else summed)
        given = inputs | {"labels": labels}
        with caplog.at_level(logging.WARNING), runs.running((), given, lambda _: ROWS):
            model(**given)
        assert ("no sum over sequences" in caplog.text) == is_whole


def test_random_numbers_of_a_head_hide_values(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run(make(Noisy), rows(), 3)
    assert "memascend: " not in caplog.text


@pytest.mark.parametrize("count", [ROWS, 3])
def test_memory_that_runs_out_in_a_proof_of_single_sequences_is_said(
    count: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = make(Own)
    sizes: list[int] = []

    def more(logits: torch.Tensor, _: Any) -> torch.Tensor:
        sizes.append(len(logits))
        if len(sizes) == count + 1:  # the first of the proof
            raise torch.OutOfMemoryError("out of device memory")
        return logits

    model.more, inputs = more, rows()
    if count == ROWS:
        with caplog.at_level(logging.WARNING):
            run(model, inputs, count)
        assert "Own is not proven to compute each sequence by itself" in caplog.text
    else:
        with pytest.raises(torch.OutOfMemoryError):
            run(model, inputs, count)
    assert sizes[count] == 2
