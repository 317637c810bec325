"""Router logits of the whole batch come from slices, with their gradient."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from memascend.slices.routers import recorded
from tests.support.sliced_models import (
    IN_PROOF,
    LENGTH,
    ROWS,
    assert_close,
    batch,
    gradients,
    make,
    run,
    sliced,
)

output_capturing = pytest.importorskip("transformers.utils.output_capturing")

FAMILIES = ("mixtral-untied", "qwen2_moe-untied", "qwen3_moe-untied")


def experts(family: str, *, weight: float = 0.5) -> tuple[Any, dict[str, Any]]:
    """A mixture whose router loss is as large as its other one."""
    model: Any = make(family)
    model.config.output_router_logits = True
    model.router_aux_loss_coef = weight
    return model, batch(model)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padded", [False, True])
def test_the_router_loss_is_that_of_the_whole_batch(
    family: str, padded: bool, caplog: pytest.LogCaptureFixture, passes: list[Any]
) -> None:
    model, inputs = experts(family)
    if not padded:
        del inputs["attention_mask"]
    loss, expected = run(model, inputs, 0)
    for count in (1, 4, 6):
        passes.clear()
        with caplog.at_level(logging.WARNING):
            found_loss, found = run(model, inputs, count)
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert_close(found, expected)
        assert all(numbers == list(range(count)) for _, numbers in passes)
        assert len(passes) == 2 * 5  # an embedding, layers, a norm and the head
    assert caplog.text == ""
    model.router_aux_loss_coef = 0.0
    without = run(model, inputs, 0)[1]
    gate = next(name for name in expected if "gate.weight" in name)
    assert (without[gate] - expected[gate]).norm() > 0.1 * expected[gate].norm()


def test_a_script_reads_router_logits_and_their_loss() -> None:
    model, inputs = experts("mixtral-untied")
    expected = model(**inputs)
    with sliced(model).running((), inputs, lambda _: 3):
        output = model(**inputs)
    assert len(output.router_logits) == len(expected.router_logits) == 2
    for found, other in zip(output.router_logits, expected.router_logits, strict=True):
        assert found.shape == (ROWS * LENGTH, 4)
        torch.testing.assert_close(found, other)
        assert found.requires_grad
    torch.testing.assert_close(output.aux_loss, expected.aux_loss)
    torch.testing.assert_close(output.logits, expected.logits)


def test_the_head_computes_slices_alone() -> None:
    """Its weights would be read from the drive once more, for the loss of router logits."""
    model, inputs = experts("mixtral-untied")
    seen: list[int] = []
    whole = model.lm_head.forward
    model.lm_head.forward = lambda states: (seen.append(states.shape[0]), whole(states))[1]
    with sliced(model).running((), inputs, lambda _: 3):
        model(**inputs)
    assert seen == [2, 2, 2, *IN_PROOF]


def test_a_layer_returns_what_it_returned_before() -> None:
    collected: dict[str, list[Any]] = {"router_logits": []}
    states, logits = torch.zeros(2, 3, 8), torch.zeros(6, 4)

    def layer(*outputs: Any) -> Any:
        output_capturing._active_collector.get()["router_logits"].append(logits)
        return outputs if len(outputs) > 1 else outputs[0]

    token = output_capturing._active_collector.set(collected)
    try:
        for given in ((states,), (states, None)):
            routers = recorded()
            assert routers is not None
            found = routers.take(routers.outputs_of(layer)(*given))
            assert found is states if len(given) == 1 else found == given
    finally:
        output_capturing._active_collector.reset(token)
    assert [torch.equal(one, logits) for one in collected["router_logits"]] == [True, True]
    assert recorded() is None


def test_a_loss_of_router_logits_of_a_script_has_its_gradient() -> None:
    model, inputs = experts("qwen3_moe-untied", weight=0.0)
    found = []
    for slices in (False, True):
        if slices:
            with sliced(model).running((), inputs, lambda _: 3):
                output = model(**inputs)
        else:
            output = model(**inputs)
        (output.loss + sum(one.square().mean() for one in output.router_logits)).backward()
        found.append(gradients(model))
    assert_close(found[1], found[0])


def test_checkpoints_of_old_lose_a_gradient_that_slices_have() -> None:
    """A reentrant checkpoint computes without a graph, in which hooks record router logits."""
    model, inputs = experts("mixtral-untied")
    expected = run(model, inputs, 0)[1]
    model.activation_checkpointing_enable({"use_reentrant": True})
    assert_close(run(model, inputs, 3)[1], expected)
    gate = next(name for name in expected if "gate.weight" in name)
    lost = run(model, inputs, 0)[1]
    assert (lost[gate] - expected[gate]).norm() > 0.1 * expected[gate].norm()


def test_layers_of_a_head_that_stays_whole_record_router_logits_in_slices(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, inputs = experts("mixtral-untied")
    loss, expected = run(model, inputs, 0)
    model.lm_head.register_forward_hook(lambda *_: None)
    with caplog.at_level(logging.WARNING):
        found_loss, found = run(model, inputs, 3)
    assert "the head of MixtralForCausalLM computes the whole batch at once" in caplog.text
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert_close(found, expected)


def test_a_layer_that_cannot_be_cut_records_router_logits_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, inputs = experts("mixtral-untied")
    loss, expected = run(model, inputs, 0)
    model.model.layers[1].add_module("extra", nn.BatchNorm1d(1, affine=False))
    with caplog.at_level(logging.WARNING):
        found_loss, found = run(model, inputs, 3)
    assert "computes statistics of the batch" in caplog.text
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert_close(found, expected)


class ExpertsFirst(nn.Module):
    """Gives a router's logits the shape (experts, tokens), with as many experts as rows."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router

    def forward(self, states: torch.Tensor) -> Any:
        found = self.router(states)
        output_capturing._active_collector.get()["router_logits"][-1:] = [found[0].T[:2]]
        return found


def test_router_logits_without_tokens_first_keep_a_layer_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, inputs = experts("mixtral-untied")
    model.model(**inputs | {"labels": None})  # hooks of transformers are there from now on
    model.model.layers[1].mlp.gate = ExpertsFirst(model.model.layers[1].mlp.gate)
    with caplog.at_level(logging.WARNING), sliced(model).running((), inputs, lambda _: 3):
        output = model.model(**inputs | {"labels": None})
    assert "records router logits of shape (2, 32) for states of shape (2, 16, " in caplog.text
    assert [tuple(one.shape) for one in output.router_logits] == [(96, 4), (2, 96)]


class ComputesLoss(transformers.MixtralForCausalLM):
    """Computes its loss itself, as kernels do that need a token."""

    def forward(self, labels: Any = None, **keywords: Any) -> Any:
        output = self.model(**keywords)
        assert output.last_hidden_state.shape[1] > 0
        logits = self.lm_head(output.last_hidden_state)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return transformers.modeling_outputs.MoeCausalLMOutputWithPast(loss=loss)


def test_a_head_with_a_loss_of_its_own_is_not_called_without_tokens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, inputs = experts("mixtral-untied")
    model.__class__ = ComputesLoss
    loss, expected = run(model, inputs, 0)
    with caplog.at_level(logging.WARNING):
        found_loss, found = run(model, inputs, 3)
    assert "its loss is more than that of its loss function" in caplog.text
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert_close(found, expected)


def test_an_older_transformers_keeps_the_model_whole(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, passes: list[Any]
) -> None:
    model, inputs = experts("mixtral-untied")
    monkeypatch.setattr("memascend.slices.routers._FILE", "transformers.of_old")
    with caplog.at_level(logging.WARNING):
        run(model, inputs, 3)
    assert "output_router_logits is on" in caplog.text
    assert passes == []
