"""Models give the gradients of the whole batch, in any number of slices."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from typing import Any

import pytest
import torch
import transformers

from memascend.slices.layers import LAYER_CLASS
from tests.parity import families
from tests.support.sliced_models import LENGTH, ROWS, Plain, assert_close, batch, make, run, sliced

#: Calls of a pass in slices, and those that are left whole: an embedding, two layers, a norm and
#: the head.
OF_DECODER = {"forward": (5, 0), "backward": (5, 0)}
#: Learned positions of all sequences stay whole, heads without a loss of their own, the bias that
#: layers of T5 pass on, and Llava's tower, which is not checkpointed.
CALLS = {
    "gpt2-tied": {"forward": (5, 1), "backward": (5, 1)},
    "bert-tied": {"forward": (6, 2), "backward": (6, 1)},
    "t5-tied": {"forward": (4, 4), "backward": (4, 4)},
    "llava-untied": {"forward": (7, 2), "backward": (7, 1)},
}


@pytest.mark.parametrize("family", families.PUBLISHED)
def test_gradients_are_those_of_the_whole_batch(
    family: str, passes: list[tuple[str, list[int]]]
) -> None:
    model = make(family)
    inputs = batch(model)
    loss, expected = run(model, inputs, 0)
    for count in (1, 4, 6):
        passes.clear()
        found_loss, found = run(model, inputs, count)
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert_close(found, expected)
        calls = CALLS.get(family, OF_DECODER)
        assert Counter(which for which, _ in passes) == {
            which: cut + whole for which, (cut, whole) in calls.items()
        }
        # A head with another loss gives up in the first slice, and so does a layer that passes a
        # bias on: with the weights that are gathered it computes the whole batch.
        others = [(which, found) for which, found in passes if found != list(range(count))]
        assert all(numbers in ([0], [0, 1]) for _, numbers in others)
        if count > 1:
            assert Counter(which for which, _ in others) == {
                which: whole for which, (_, whole) in calls.items() if whole
            }


@pytest.mark.parametrize("family", ["Mistral", "Gemma3Text"])
def test_layers_with_sliding_windows_are_cut(family: str, passes: list[Any]) -> None:
    """A mask for each kind of layer."""
    torch.manual_seed(0)
    shape = families.DECODER | families.HEAD | {"sliding_window": 4}
    config = getattr(transformers, f"{family}Config")(**shape)
    model = transformers.AutoModelForCausalLM.from_config(config).float().train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    inputs = batch(model)
    expected = run(model, inputs, 0)[1]
    passes.clear()
    assert_close(run(model, inputs, 3)[1], expected)
    assert passes == [(which, [0, 1, 2]) for which, _ in passes]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_masks_of_every_kind_are_cut(implementation: str) -> None:
    model = make("llama-untied")
    model.config._attn_implementation = implementation
    inputs = batch(model)
    whole = torch.zeros(ROWS, 1, LENGTH, LENGTH)
    whole.masked_fill_(torch.ones(LENGTH, LENGTH).triu(1).bool(), torch.finfo(torch.float32).min)
    for mask in (None, inputs["attention_mask"], whole, whole[:1]):
        given = inputs | {"attention_mask": mask}
        assert_close(run(model, given, 3)[1], run(model, given, 0)[1])


def test_hidden_states_that_hooks_record_inside_of_checkpoints_keep_the_model_whole(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, passes: list[Any]
) -> None:
    """As with older transformers, whose layers have a `__call__` of their own."""
    model: Any = make("llama-untied")
    inputs = batch(model) | {"output_hidden_states": True}
    run(model, inputs, 3)
    assert passes
    passes.clear()
    layer = next(one for one in type(model.model.layers[0]).__mro__ if one.__name__ == LAYER_CLASS)
    monkeypatch.setattr(layer, "__call__", torch.nn.Module.__call__, raising=False)
    with caplog.at_level(logging.WARNING):
        run(model, inputs, 3)
    assert "output_hidden_states is on" in caplog.text
    assert passes == []


def test_attention_that_is_recorded_inside_of_layers_keeps_the_model_whole(
    caplog: pytest.LogCaptureFixture, passes: list[Any]
) -> None:
    model: Any = make("mixtral-untied")
    model.config._attn_implementation = "eager"
    inputs = batch(model) | {"output_attentions": True}
    with caplog.at_level(logging.WARNING):
        loss, found = run(model, inputs, 3)
    assert "output_attentions is on" in caplog.text
    assert passes == []
    expected_loss, expected = run(model, inputs, 0)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert_close(found, expected)


@pytest.mark.parametrize("given", [None, False])
def test_a_setting_that_a_call_leaves_open_is_that_of_the_configuration(
    given: bool | None, caplog: pytest.LogCaptureFixture, passes: list[Any]
) -> None:
    model: Any = make("llama-untied")
    model.config._attn_implementation = "eager"
    model.config.output_attentions = True
    with caplog.at_level(logging.WARNING):
        run(model, batch(model) | {"output_attentions": given}, 3)
    assert ("output_attentions is on" in caplog.text) == (given is None) == (not passes)


def test_nothing_of_the_model_changes_outside_of_a_pass() -> None:
    model = make("llama-untied")
    inputs = batch(model)
    before = {name: set(vars(one)) for name, one in model.named_modules()}
    functions = [vars(one).get("_gradient_checkpointing_func") for one in model.modules()]
    model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), sliced(model).running((), inputs, lambda _: 3):
        model(**inputs)
    assert {name: set(vars(one)) for name, one in model.named_modules()} == before
    assert functions == [vars(one).get("_gradient_checkpointing_func") for one in model.modules()]
    model.model.layers[1]._forward_pre_hooks.clear()
    assert_close(run(model, inputs, 3)[1], run(model, inputs, 0)[1])


@pytest.mark.parametrize("how", ["eval", "no_grad"])
def test_a_pass_without_training_is_not_cut(
    how: str, passes: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = make("llama-untied")
    inputs = batch(model)
    model.train(how != "eval")
    with torch.set_grad_enabled(how != "no_grad"), sliced(model).running((), inputs, lambda _: 3):
        assert model(**inputs).logits.shape[0] == ROWS
    assert passes == []
    assert ("evaluation mode with gradients on" in caplog.text) == (how == "eval")


def test_without_checkpoints_the_log_says_what_to_turn_on(caplog: Any) -> None:
    model = make("llama-untied")
    model.gradient_checkpointing_disable()
    inputs = batch(model)
    with caplog.at_level(logging.WARNING):
        found = run(model, inputs, 3)[1]
    assert "gradient_checkpointing=True" in caplog.text
    assert_close(found, run(model, inputs, 0)[1])


def test_frozen_weights_and_inputs_get_no_gradient() -> None:
    model = make("llama-untied")
    for name, param in model.named_parameters():
        param.requires_grad_("layers.1" in name)
    inputs = batch(model)
    expected = run(model, inputs, 0)[1]
    found = run(model, inputs, 3)[1]
    assert found.keys() == expected.keys()
    assert_close(found, expected)


def test_a_norm_without_weights_runs_in_slices_if_its_input_wants_a_gradient(
    passes: list[Any],
) -> None:
    class Normed(Plain):
        def __init__(self) -> None:
            super().__init__(reentrant=False)
            self.norm = torch.nn.LayerNorm(8, elementwise_affine=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            states = self.embedding(ids)
            return (self.norm(states)[..., 0] * states[..., 1]).mean()

    model, ids = Normed(), torch.randint(50, (ROWS, LENGTH))
    for trains, count in ((True, 2), (False, 0)):
        model.embedding.requires_grad_(trains)
        passes.clear()
        with sliced(model).running((ids,), {}, lambda _: 3):
            model(ids)
        assert passes == [("forward", [0, 1, 2])] * count


def test_a_model_is_copied_while_it_runs_and_behind() -> None:
    model = make("llama-untied")
    inputs = batch(model)
    expected = run(model, inputs, 0)[1]
    run(model, inputs, 3)
    assert_close(run(copy.deepcopy(model), inputs, 2)[1], expected)


def test_a_batch_that_is_not_to_be_seen_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    class Given(Plain):
        def forward(self, rows: Any) -> torch.Tensor:
            return super().forward(rows["ids"])

    model, rows = Given(reentrant=False), {"ids": torch.randint(50, (ROWS, LENGTH))}
    runs = sliced(model)
    with caplog.at_level(logging.WARNING):
        with torch.no_grad(), runs.running((rows,), {}, lambda _: 3):
            model(rows)
        for _ in range(2):
            with runs.running((rows,), {}, lambda _: 3):
                model(rows)
    (line,) = caplog.messages
    assert line.endswith("at once: none of its arguments is a tensor of sequences")


def test_a_batch_of_no_rows_is_one_slice(passes: list[tuple[str, list[int]]]) -> None:
    """Other ranks may have rows, and gather weights as often."""
    model, ids = Plain(reentrant=False), torch.randint(50, (0, LENGTH))
    with sliced(model).running((ids,), {}, lambda _: 1):
        model(ids).backward()
    calls = 3  # the embedding and two layers
    assert passes == [("forward", [0])] * calls + [("backward", [0])] * calls
