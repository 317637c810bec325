"""Fused heads in slices give the values of all tokens, and the gradients of micro-steps."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memascend.slices.cut import CannotCut
from memascend.slices.fused import FusedLoss, check_counts, mark_as_gathered
from tests.support.sliced_models import (
    LENGTH,
    ROWS,
    assert_close,
    batch,
    gradients,
    make,
    run,
    sliced,
)

utils = pytest.importorskip("trl.trainer.utils")
if not hasattr(utils, "add_fused_lm_head"):
    pytest.skip("this TRL has no add_fused_lm_head", allow_module_level=True)

OUTPUTS = ("log_probs", "entropy", "is_top1", "mean_logits", "log_sum_sq_probs")
ITEMS = 77
WORD_COUNT = 64


def fused(family: str) -> tuple[Any, dict[str, Any]]:
    model: Any = make(family)
    utils.add_fused_lm_head(model, outputs=OUTPUTS)
    return model, batch(model) | {"fused_lm_head": True}


def with_liger(family: str) -> tuple[Any, dict[str, Any]]:
    """Return a model with Liger's loss, and a batch, small enough for Triton's interpreter.

    It takes milliseconds for each word of the vocabulary. Other kernels of Liger do not run in it.
    """
    monkey_patch = pytest.importorskip("liger_kernel.transformers.monkey_patch")
    model: Any = make(family)
    apply = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type]
    kernels = dict.fromkeys(inspect.signature(apply).parameters, False)
    apply(**kernels | {"model": model, "fused_linear_cross_entropy": True})
    inputs = {name: one[:, :6] for name, one in batch(model).items()}
    model.resize_token_embeddings(WORD_COUNT)
    for name in ("input_ids", "labels"):
        inputs[name] = inputs[name].where(inputs[name] < 0, inputs[name] % WORD_COUNT)
    return model, inputs


def train(model: Any, inputs: dict[str, Any], count: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the output, and gradients of a loss as the SFTTrainer computes it; 0: no slices."""
    if count == 0:
        output = model(**inputs)
    else:
        with sliced(model).running((), inputs, lambda _: count):
            output = model(**inputs)
    loss = -output.log_probs.sum() / ITEMS
    if output.aux_loss is not None:
        loss = loss + 0.5 * output.aux_loss
    loss.backward()
    return output, gradients(model)


def assert_same(found: Any, expected: Any) -> None:
    assert list(found) == list(expected)
    for name, one in expected.items():
        assert found[name].dtype == one.dtype
        torch.testing.assert_close(found[name], one, msg=name)


@pytest.mark.parametrize("family", ["llama-untied", "qwen2-tied", "gemma-tied", "phi-untied"])
def test_values_and_gradients_are_those_of_the_whole_batch(
    family: str, caplog: pytest.LogCaptureFixture, passes: list[Any]
) -> None:
    model, inputs = fused(family)
    output, expected = train(model, inputs, 0)
    assert output.label_mask.shape == (ROWS, LENGTH - 1)
    for count in (1, 4):
        passes.clear()
        with caplog.at_level(logging.WARNING):
            found_output, found = train(model, inputs, count)
        assert_same(found_output, output)
        assert_close(found, expected)
        assert ("backward", list(range(count))) == passes[len(passes) // 2][:2]
    assert caplog.text == ""


def assert_bits_of_micro_steps(
    model: Any, inputs: dict[str, Any], loss_of: Callable[[Any], torch.Tensor]
) -> None:
    """The head's gradient is rounded to the weight's dtype once in each call."""
    inputs["attention_mask"][::2, -2:] = 0  # a row of each slice is padded
    model.bfloat16()
    for param in model.parameters():
        param.grad_dtype = torch.float32
    loss_of(model(**inputs)).backward()
    whole = gradients(model)
    with sliced(model).running((), inputs, lambda _: 3):
        output = model(**inputs)
    loss_of(output).backward()
    found = gradients(model)
    for first in range(0, ROWS, 2):
        part = {
            name: one[first : first + 2] if torch.is_tensor(one) and one.dim() else one
            for name, one in inputs.items()
        }
        loss_of(model(**part)).backward()
    expected = gradients(model)
    assert [name for name, one in expected.items() if not torch.equal(found[name], one)] == []
    assert not torch.equal(whole["lm_head.weight"], expected["lm_head.weight"])


def test_slices_have_the_bits_of_micro_steps() -> None:
    model, inputs = fused("llama-untied")
    assert_bits_of_micro_steps(model, inputs, lambda output: -output.log_probs.sum() / ITEMS)


@pytest.mark.parametrize("items", [None, torch.tensor(ITEMS)])
def test_its_own_loss_is_that_of_the_whole_batch(items: torch.Tensor | None) -> None:
    model, inputs = fused("qwen3-untied")
    inputs["num_items_in_batch"] = items
    model(**inputs).loss.backward()
    expected = gradients(model)
    with sliced(model).running((), inputs, lambda _: 4):
        model(**inputs).loss.backward()
    assert_close(gradients(model), expected)


def test_router_losses_are_those_of_the_whole_batch(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("transformers.utils.output_capturing")
    model, inputs = fused("mixtral-untied")
    inputs["output_router_logits"] = True
    output, expected = train(model, inputs, 0)
    with caplog.at_level(logging.WARNING):
        found_output, found = train(model, inputs, 3)
    assert caplog.text == ""
    assert_same(found_output, output)
    assert_close(found, expected)


def test_the_head_of_a_packed_row_has_a_value_for_each_token_but_the_last() -> None:
    model, inputs = fused("llama-untied")
    ids = inputs["input_ids"].reshape(1, -1)
    apart = torch.block_diag(*[torch.ones(LENGTH, LENGTH).tril()] * ROWS)
    mask = torch.zeros_like(apart).masked_fill(apart == 0, torch.finfo(torch.float32).min)
    row = {
        "input_ids": ids,
        "labels": ids,
        "position_ids": torch.arange(LENGTH).repeat(ROWS)[None],
        "attention_mask": mask[None, None],
        "fused_lm_head": True,
    }
    output, expected = train(model, row, 0)
    assert output.log_probs.shape == (1, ROWS * LENGTH - 1)
    found_output, found = train(model, row, 3)
    assert_same(found_output, output)
    assert_close(found, expected)


def test_a_head_without_labels_for_any_token_gives_zero() -> None:
    model, inputs = fused("llama-untied")
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    with sliced(model).running((), inputs, lambda _: 3):
        output = model(**inputs)
    assert output.loss.item() == 0.0
    assert not output.label_mask.any()


def test_weights_are_gathered_for_each_slice_by_a_call_of_their_module() -> None:
    """DeepSpeed does so before a module's call, and TRL reads the weight without one."""
    model, inputs = fused("llama-untied")
    seen: list[tuple[int, ...]] = []

    def before(module: nn.Module, arguments: Any) -> None:
        seen.append(tuple(arguments[0].shape[:2]))

    before.__module__ = "deepspeed.runtime"  # a hook that slices know
    model.lm_head.register_forward_pre_hook(before)
    train(model, inputs, 3)
    proof = [(2, 0), (1, 0), (1, 0)]
    assert seen == [(2, 0)] * 3 + proof + [(2, 0)] * 3  # forward, and recomputed in backward


@pytest.mark.parametrize(
    ("family", "items"), [("qwen3-untied", None), ("mixtral-untied", torch.tensor(ITEMS))]
)
def test_ligers_loss_is_that_of_the_whole_batch(
    family: str, items: torch.Tensor | None, caplog: pytest.LogCaptureFixture
) -> None:
    model, inputs = with_liger(family)
    inputs["num_items_in_batch"] = items
    model.config.output_router_logits = family.startswith("mixtral")
    model.router_aux_loss_coef = 0.5
    loss, expected = run(model, inputs, 0)
    with caplog.at_level(logging.WARNING):
        found_loss, found = run(model, inputs, 4)
    assert "memascend: " not in caplog.text  # transformers logs, too
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert_close(found, expected)


def test_slices_with_ligers_loss_have_the_bits_of_micro_steps() -> None:
    model, inputs = with_liger("qwen3-untied")
    inputs["num_items_in_batch"] = torch.tensor(ITEMS)
    assert_bits_of_micro_steps(model, inputs, lambda output: output.loss)


def test_a_weight_of_no_module_is_marked_as_deepspeed_marks_a_gathered_one() -> None:
    zero = pytest.importorskip("deepspeed.runtime.zero.partition_parameters")
    weight = torch.zeros(1, 4)
    mark_as_gathered(weight)
    assert weight.ds_status is zero.ZeroParamStatus.AVAILABLE


def test_values_that_are_not_of_tokens_cannot_be_put_together() -> None:
    labels = torch.zeros(2, 4).long()
    output = utils.FusedCausalLMOutput(loss=torch.zeros(()), log_probs=torch.zeros(2))
    with pytest.raises(CannotCut, match="log_probs has no value for each token"):
        FusedLoss(labels, None).take(output, labels)
    with pytest.raises(CannotCut, match="more than a fused one"):
        FusedLoss(labels, None)()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ignore_index": 0}, "ignore_index is 0, and not -100"),
        ({"ce_weight": torch.ones(4)}, "its tokens have weights"),
        ({"labels": torch.zeros(8, dtype=torch.long)}, r"labels of shape \(8,\)"),
    ],
)
def test_a_loss_that_is_no_sum_over_counted_tokens_is_left_whole(
    given: dict[str, Any], words: str
) -> None:
    model, inputs = fused("llama")
    check_counts(model.forward, inputs)
    with pytest.raises(CannotCut, match=words):
        check_counts(model.forward, inputs | given)


def test_a_head_of_an_older_liger_takes_means_and_is_left_whole() -> None:
    def LigerFusedLinearCrossEntropyLoss() -> Any: ...

    namespace: dict[str, Any] = {
        "LigerFusedLinearCrossEntropyLoss": LigerFusedLinearCrossEntropyLoss
    }
    exec("def forward(self, labels, **_):\n  LigerFusedLinearCrossEntropyLoss()", namespace)
    with pytest.raises(CannotCut, match="takes the mean of each call"):
        check_counts(namespace["forward"], {"labels": torch.zeros(2, 4)})
