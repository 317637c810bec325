"""Models give the gradients of the whole batch, whatever they are made of, in any number of slices."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memascend.slices.head import MissingLogitsError
from memascend.slices.layers import Slicer
from memascend.slices.model import SlicedModel
from tests.parity import families

ROWS, LENGTH = 6, 16


class Weights:
    """Notes the slices of each pass."""

    passes: list[tuple[str, list[int]]]

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        assert params

    @contextmanager
    def in_forward(self) -> Iterator[Callable[[int], None]]:
        numbers: list[int] = []
        self.passes.append(("forward", numbers))
        yield numbers.append

    @contextmanager
    def in_backward(self, count: int) -> Iterator[Callable[[int], None]]:
        numbers: list[int] = []
        self.passes.append(("backward", numbers))
        yield numbers.append
        assert numbers == list(range(count))


@pytest.fixture(autouse=True)
def passes() -> list[tuple[str, list[int]]]:
    Weights.passes = []
    return Weights.passes


def sliced(model: nn.Module, **options: Any) -> SlicedModel:
    return SlicedModel(model, Slicer(Weights), **{"slices_head": True} | options)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    return found


def run(model: nn.Module, inputs: dict[str, Any], count: int) -> tuple[float, dict[str, Any]]:
    """The loss and the gradients; count 0: without slices."""
    if count == 0:
        loss = model(**inputs).loss
    else:
        with sliced(model).running((), inputs, lambda _: count):
            loss = model(**inputs).loss
    loss.backward()
    return loss.item(), gradients(model)


def make(family: str) -> nn.Module:
    torch.manual_seed(0)
    model = families.maker(family)().float().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def batch(model: Any, *, padded: bool = True) -> dict[str, Any]:
    ids = torch.randint(1, families.VOCABULARY - 1, (ROWS, LENGTH))
    inputs: dict[str, Any] = families.inputs(model.config, ids)
    before = inputs["input_ids"].shape[1] - LENGTH
    mask = torch.ones_like(ids)
    if padded:
        mask[2, 10:] = mask[5, 3:] = 0
    inputs["labels"] = nn.functional.pad(ids.masked_fill(mask == 0, -100), (before, 0), value=-100)
    inputs["attention_mask"] = nn.functional.pad(mask, (before, 0), value=1)
    return inputs


def assert_close(found: dict[str, Any], expected: dict[str, Any], rel: float = 2e-6) -> None:
    assert found.keys() == expected.keys()
    largest = max(one.norm() for one in expected.values())
    for name, one in expected.items():
        error = (found[name] - one).norm()
        assert error <= rel * one.norm() + 1e-9 * largest, name


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
        done = [numbers for _, numbers in passes if numbers == list(range(count))]
        # A layer that passes a bias on, or a head with another loss, gives up in the first slice.
        assert all(numbers == [0] for _, numbers in passes if numbers not in done)
        assert len(done) >= 4


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


def test_a_sum_over_items_is_divided_once() -> None:
    model = make("qwen3-untied")
    inputs = batch(model) | {"num_items_in_batch": torch.tensor(77)}
    loss, expected = run(model, inputs, 0)
    found_loss, found = run(model, inputs, 4)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert_close(found, expected)


def test_logits_exist_for_one_slice_and_are_missed_by_name() -> None:
    model: Any = make("llama-untied")
    inputs = batch(model)
    seen: list[int] = []
    model.lm_head.register_forward_hook(lambda *call: seen.append(call[2].shape[0]))
    with sliced(model).running((), inputs, lambda _: 3):
        output = model(**inputs)
    assert seen == [2, 2, 2]
    with pytest.raises(MissingLogitsError, match='"head": false'):
        output.logits  # noqa: B018
    assert getattr(output, "logits", None) is None
    with sliced(model, slices_head=False).running((), inputs, lambda _: 3):
        assert model(**inputs).logits.shape[0] == ROWS


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"labels": None}, "is not given labels"),
        ({"return_dict": False}, "return_dict=False"),
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
    logits = output[1] if "return_dict" in changes else output.logits
    assert logits.shape[0] == ROWS


@pytest.mark.parametrize("name", ["output_router_logits", "output_attentions"])
def test_values_that_are_recorded_inside_of_layers_keep_the_model_whole(
    name: str, caplog: pytest.LogCaptureFixture, passes: list[Any]
) -> None:
    model: Any = make("mixtral-untied")
    model.config._attn_implementation = "eager"
    inputs = batch(model) | {name: True}
    with caplog.at_level(logging.WARNING):
        loss, found = run(model, inputs, 3)
    assert f"{name} is on" in caplog.text
    assert passes == []
    expected_loss, expected = run(model, inputs, 0)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert_close(found, expected)


def test_nothing_of_the_model_changes_outside_of_a_pass() -> None:
    model = make("llama-untied")
    inputs = batch(model)
    before = {name: set(vars(one)) for name, one in model.named_modules()}
    functions = [vars(one).get("_gradient_checkpointing_func") for one in model.modules()]
    with pytest.raises(ZeroDivisionError), sliced(model).running((), inputs, lambda _: 3):
        model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        model(**inputs)
    assert {name: set(vars(one)) for name, one in model.named_modules()} == before
    assert functions == [vars(one).get("_gradient_checkpointing_func") for one in model.modules()]
    model.model.layers[1]._forward_pre_hooks.clear()
    assert_close(run(model, inputs, 3)[1], run(model, inputs, 0)[1])


@pytest.mark.parametrize("how", ["eval", "no_grad"])
def test_a_pass_without_training_is_not_cut(how: str, passes: list[Any]) -> None:
    model = make("llama-untied")
    inputs = batch(model)
    model.train(how != "eval")
    with torch.set_grad_enabled(how != "no_grad"), sliced(model).running((), inputs, lambda _: 3):
        assert model(**inputs).logits.shape[0] == ROWS
    assert passes == []


def test_without_checkpoints_the_log_says_what_to_turn_on(caplog: Any) -> None:
    model = make("llama-untied")
    model.gradient_checkpointing_disable()
    inputs = batch(model)
    with caplog.at_level(logging.WARNING):
        found = run(model, inputs, 3)[1]
    assert "gradient_checkpointing=True" in caplog.text
    assert_close(found, run(model, inputs, 0)[1])


class Plain(nn.Module):
    """A model of a script's own, with torch's checkpoints."""

    def __init__(self, *, reentrant: bool, probability: float = 0.0) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embedding = nn.Embedding(50, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=probability, batch_first=True)
            for _ in range(2)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states = self.embedding(ids)
        for layer in self.layers:
            states = checkpoint(layer, states, use_reentrant=self.reentrant)
        return states.square().mean()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_torch_are_cut(reentrant: bool, passes: list[Any]) -> None:
    torch.manual_seed(0)
    model = Plain(reentrant=reentrant)
    ids = torch.randint(50, (ROWS, LENGTH))
    model(ids).backward()
    expected = gradients(model)
    with sliced(model).running((ids,), {}, lambda _: 3):
        loss = model(ids)
    loss.backward()
    assert_close(gradients(model), expected)
    assert [numbers for _, numbers in passes] == [[0, 1, 2]] * 6  # embedding and layers


def test_backward_has_the_random_numbers_of_forward() -> None:
    """The slope along a gradient is its square, if both saw the same dropout."""
    torch.manual_seed(0)
    model = Plain(reentrant=False, probability=0.3).double()
    ids = torch.randint(50, (ROWS, LENGTH))

    def loss() -> torch.Tensor:
        torch.manual_seed(1)
        with sliced(model).running((ids,), {}, lambda _: 3):
            return model(ids)

    value = loss()
    value.backward()
    found = gradients(model)
    step = 1e-6
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name in found:
                param += step * found[name]
    slope = (loss() - value).item() / step
    assert slope == pytest.approx(
        sum(one.square().sum().item() for one in found.values()), rel=1e-3
    )


def test_random_numbers_behind_a_backward_pass_are_those_of_no_recomputation() -> None:
    model = Plain(reentrant=False, probability=0.3)
    ids = torch.randint(50, (ROWS, LENGTH))
    with sliced(model).running((ids,), {}, lambda _: 3):
        loss = model(ids)
    state = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_autocast_of_forward_is_that_of_backward() -> None:
    torch.manual_seed(0)
    model = make("llama-untied")
    inputs = batch(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**inputs).loss
    loss.backward()
    expected = gradients(model)
    with torch.autocast("cpu", torch.bfloat16), sliced(model).running((), inputs, lambda _: 3):
        loss = model(**inputs).loss
    loss.backward()
    assert_close(gradients(model), expected, rel=2e-2)


def test_statistics_of_the_batch_keep_a_layer_whole(caplog: Any, passes: list[Any]) -> None:
    model = Plain(reentrant=False)
    model.layers[0].norm1 = nn.BatchNorm1d(LENGTH)
    ids = torch.randint(50, (ROWS, LENGTH))
    with caplog.at_level(logging.WARNING), sliced(model).running((ids,), {}, lambda _: 3):
        model(ids).backward()
    assert "BatchNorm1d computes statistics of the batch" in caplog.text
    assert len([one for one in passes if one[0] == "forward"]) == 2  # the embedding, a layer


def test_frozen_weights_and_inputs_get_no_gradient() -> None:
    model = make("llama-untied")
    for name, param in model.named_parameters():
        param.requires_grad_("layers.1" in name)
    inputs = batch(model)
    expected = run(model, inputs, 0)[1]
    found = run(model, inputs, 3)[1]
    assert found.keys() == expected.keys()
    assert_close(found, expected)


def test_a_graph_that_is_dropped_keeps_nothing() -> None:
    model = make("llama-untied")
    inputs = batch(model)
    with sliced(model).running((), inputs, lambda _: 3):
        output = model(**inputs)
    node = weakref.ref(output.loss)
    del output
    assert node() is None
    assert_close(run(model, inputs, 3)[1], run(model, inputs, 0)[1])


def test_a_graph_is_differentiated_twice_if_it_is_retained() -> None:
    model = make("llama-untied")
    inputs = batch(model)
    expected = run(model, inputs, 0)[1]
    with sliced(model).running((), inputs, lambda _: 3):
        loss = model(**inputs).loss
    loss.backward(retain_graph=True)
    loss.backward()
    twice = {name: one / 2 for name, one in gradients(model).items()}
    assert_close(twice, expected)


def test_a_model_is_copied_while_it_runs_and_behind() -> None:
    model = make("llama-untied")
    inputs = batch(model)
    expected = run(model, inputs, 0)[1]
    run(model, inputs, 3)
    assert_close(run(copy.deepcopy(model), inputs, 2)[1], expected)
