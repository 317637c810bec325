"""Losses of classifiers in slices are those of the whole batch, and of as many micro-steps."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
import torch
import transformers

from memascend.slices.losses import is_known
from tests.support.sliced_models import IN_PROOF, LENGTH, ROWS, assert_close, gradients, run, sliced

VOCABULARY = 32
SINGLE, MULTI = "single_label_classification", "multi_label_classification"
#: Problem, number of outputs, and shape and dtype of labels.
PROBLEMS: dict[str, tuple[str | None, int, tuple[int, ...], torch.dtype]] = {
    "regression": ("regression", 1, (ROWS,), torch.float32),
    "regression of columns": ("regression", 1, (ROWS, 1), torch.float32),
    "regression of vectors": ("regression", 3, (ROWS, 3), torch.float32),
    "classes": (SINGLE, 3, (ROWS,), torch.int64),
    "several classes": (MULTI, 3, (ROWS, 3), torch.float32),
    "one class of numbers": (None, 3, (ROWS,), torch.int64),
    "several of vectors": (None, 3, (ROWS, 3), torch.float32),
    "regression of integers": (None, 1, (ROWS,), torch.int64),
}


def classifier(
    count: int, problem: str | None, made: Any = transformers.LlamaForSequenceClassification
) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        use_cache=False,
    )
    config.num_labels, config.problem_type, config.classifier_dropout = count, problem, 0.0
    model = made(config).train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def rows_of(shape: tuple[int, ...], dtype: torch.dtype, classes: int) -> dict[str, torch.Tensor]:
    """Rows of different lengths."""
    ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH))
    mask = torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (ROWS, 1))
    labels = torch.randint(classes, shape) if dtype == torch.int64 else torch.rand(shape)
    return {"input_ids": ids * mask, "attention_mask": mask.long(), "labels": labels}


def make(kind: str) -> tuple[Any, dict[str, torch.Tensor]]:
    problem, count, shape, dtype = PROBLEMS[kind]
    return classifier(count, problem), rows_of(shape, dtype, count)


@pytest.mark.parametrize("kind", PROBLEMS)
def test_a_classifier_in_slices_has_the_loss_of_the_whole_batch(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, inputs = make(kind)
    loss, expected = run(model, inputs, 0)
    for count in (1, 3, 4, 6):  # 4: slices of two rows and of one
        with caplog.at_level(logging.WARNING):
            found_loss, found = run(model, inputs, count)
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert_close(found, expected)
    assert caplog.text == ""


@pytest.mark.parametrize("kind", PROBLEMS)
def test_a_classifier_in_slices_has_the_bits_of_micro_steps(kind: str) -> None:
    model, inputs = make(kind)
    for first in range(0, ROWS, ROWS // 2):
        rows = {name: one[first : first + ROWS // 2] for name, one in inputs.items()}
        (model(**rows).loss / 2).backward()
    expected = gradients(model)
    found = run(model, inputs, 2)[1]
    assert found.keys() == expected.keys()
    assert [name for name, one in expected.items() if not torch.equal(found[name], one)] == []


def test_a_loss_in_bf16_is_added_up_without_rounding() -> None:
    model, inputs = make("classes")
    model = model.to(torch.bfloat16)
    parts = [{name: one[at : at + 2] for name, one in inputs.items()} for at in range(0, 4, 2)]
    expected = sum(model(**rows).loss.double() / 2 for rows in parts)
    four = {name: one[:4] for name, one in inputs.items()}
    with sliced(model).running((), four, lambda _: 2):
        assert model(**four).loss.double() == expected


def test_ignored_labels_are_not_counted_in_any_slice() -> None:
    model, inputs = make("classes")
    inputs["labels"][[0, 1, 4]] = -100  # all of a slice
    loss, expected = run(model, inputs, 0)
    found_loss, found = run(model, inputs, 3)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert_close(found, expected)


def test_a_number_of_items_that_the_model_ignores_is_ignored() -> None:
    """The Trainer gives it to all models with any keywords; classifiers pass it on to no loss."""
    model, inputs = make("classes")
    loss, expected = run(model, inputs, 0)
    found_loss, found = run(model, inputs | {"num_items_in_batch": torch.tensor(77)}, 3)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert_close(found, expected)


def test_labels_of_tokens_are_counted_over_all_slices(caplog: pytest.LogCaptureFixture) -> None:
    model = classifier(3, None, transformers.LlamaForTokenClassification)
    inputs = rows_of((ROWS, LENGTH), torch.int64, 3)
    inputs["labels"].masked_fill_(inputs["attention_mask"] == 0, -100)
    loss, expected = run(model, inputs, 0)
    with caplog.at_level(logging.WARNING):
        found_loss, found = run(model, inputs, 4)
    assert caplog.text == ""
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert_close(found, expected)


class MasksLabels(transformers.LlamaForCausalLM):
    """Ignores the labels of padding."""

    in_place = False

    def forward(self, attention_mask: Any = None, labels: Any = None, **keywords: Any) -> Any:
        if labels is not None and attention_mask is not None:
            padding = attention_mask == 0
            mask = labels.masked_fill_ if self.in_place else labels.masked_fill
            labels = mask(padding, -100)
        return super().forward(attention_mask=attention_mask, labels=labels, **keywords)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("items", [None, torch.tensor(77)])
def test_labels_that_a_forward_ignores_are_not_counted(
    in_place: bool, items: torch.Tensor | None, caplog: pytest.LogCaptureFixture
) -> None:
    """On all ranks alike: the rows of some have no padding."""
    model = classifier(3, None, MasksLabels)
    model.in_place = in_place
    inputs = rows_of((ROWS, LENGTH), torch.int64, 3) | {"num_items_in_batch": items}
    labels = inputs["labels"].clone()
    loss, expected = run(model, inputs | {"labels": labels.clone()}, 0)
    for count in (1, 4):
        with caplog.at_level(logging.WARNING):
            found_loss, found = run(model, inputs | {"labels": labels.clone()}, count)
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert_close(found, expected)
    assert "head" not in caplog.text


@pytest.mark.parametrize("in_place", [False, True])
def test_a_forward_that_changes_labels_of_a_packed_row_keeps_the_head_whole(
    in_place: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Slices have shifted labels, made before the change."""
    model = classifier(3, None, MasksLabels)
    model.in_place = in_place
    inputs = one_row(rows_of((ROWS, LENGTH), torch.int64, 3))
    inputs["attention_mask"] = torch.ones(1, LENGTH).long()
    inputs["attention_mask"][0, -5:] = 0
    labels = inputs["labels"]
    loss, expected = run(model, inputs | {"labels": labels.clone()}, 0)
    with caplog.at_level(logging.WARNING):
        found_loss, found = run(model, inputs | {"labels": labels.clone()}, 2)
    assert "its forward changes labels" in caplog.text
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert_close(found, expected)


def test_adapters_of_a_task_do_not_hide_the_head(caplog: pytest.LogCaptureFixture) -> None:
    peft = pytest.importorskip("peft")
    model, inputs = make("classes")
    config = peft.LoraConfig(
        task_type="SEQ_CLS", target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    adapted = peft.get_peft_model(model, config).train()
    loss, expected = run(adapted, inputs, 0)
    seen: list[int] = []
    score = adapted.base_model.model.score
    whole = score.forward
    score.forward = lambda states: (seen.append(states.shape[0]), whole(states))[1]
    with caplog.at_level(logging.WARNING):
        found_loss, found = run(adapted, inputs, 3)
    assert "memascend: " not in caplog.text  # bitsandbytes may log, too
    assert seen == [2, 2, 2, *IN_PROOF, 2, 2, 2]
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert_close(found, expected)


def test_a_batch_without_a_padding_token_stays_an_error_in_slices_of_one_row() -> None:
    model, inputs = make("classes")
    model.config.pad_token_id = None
    with (
        pytest.raises(ValueError, match="no padding token"),
        sliced(model).running((), inputs, lambda _: ROWS),
    ):
        model(**inputs)


def test_a_script_reads_the_logits_of_all_rows() -> None:
    model, inputs = make("classes")
    expected = model(**inputs).logits
    assert expected.shape == (ROWS, 3)
    with sliced(model).running((), inputs, lambda _: 3):
        output = model(**inputs)
    assert torch.equal(output.logits, expected)


def one_row(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Two documents in a row, without padding."""
    half = torch.arange(LENGTH // 2)
    return {
        "input_ids": inputs["input_ids"][:1].clamp(min=1),
        "position_ids": torch.cat([half, half])[None],
        "labels": inputs["labels"][:1],
    }


def embedded(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rows that are embedded outside of the model."""
    embeddings = torch.randn(ROWS, LENGTH, 32)
    return {"inputs_embeds": embeddings, "labels": inputs["labels"]}


@pytest.mark.parametrize(
    ("changed", "reason", "first"),
    [
        # One slice, as on a rank whose row has one document.
        (one_row, "a row of several documents", [0]),
        (embedded, "more than hidden states", [0, 1]),  # the norm's, before a head without slices
    ],
)
def test_a_classifier_that_cannot_be_cut_stays_whole(
    changed: Any,
    reason: str,
    first: list[int],
    passes: list[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, inputs = make("classes")
    inputs = changed(inputs)
    loss, expected = run(model, inputs, 0)
    with caplog.at_level(logging.WARNING):
        found_loss, found = run(model, inputs, 2)
    assert reason in caplog.text
    assert next(numbers for kind, numbers in passes if kind == "backward") == first
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert_close(found, expected)


def test_labels_that_are_broadcast_over_rows_keep_the_head_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Torch's mean compares each of six outputs with the label of another row."""
    model, inputs = classifier(ROWS, "regression"), rows_of((ROWS,), torch.float32, 0)
    loss, expected = run(model, inputs, 0)
    with caplog.at_level(logging.WARNING):
        found_loss, found = run(model, inputs, 3)
    assert f"labels of shape ({ROWS},), and has {ROWS} outputs" in caplog.text
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert_close(found, expected)


def test_a_hook_on_a_classifier_sees_the_whole_batch(caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = make("classes")
    seen: list[torch.Tensor] = []
    model.score.register_forward_hook(lambda *call: seen.append(call[2]))
    with caplog.at_level(logging.WARNING):
        run(model, inputs, 3)
    assert "has a hook, " in caplog.text
    assert [(len(one), one.requires_grad) for one in seen] == [(ROWS, True)]


IDS, CLASSES = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 30 + 2, torch.arange(ROWS) % 3
PLACES = {
    "start_positions": torch.arange(ROWS),
    "end_positions": 4 * torch.arange(ROWS),
}  # the last is ignored
OWN: dict[str, tuple[dict[str, Any], str]] = {
    "LlamaForQuestionAnswering": (PLACES, "is not given labels"),
    "BertForQuestionAnswering": (PLACES, "is not given labels"),
    "BertForSequenceClassification": ({"labels": CLASSES}, "pooler_output"),
    "RobertaForTokenClassification": ({"labels": IDS % 3}, "more than that of its loss function"),
    "GPT2ForSequenceClassification": ({"labels": CLASSES}, "more than that of its loss function"),
    "BertForNextSentencePrediction": ({"labels": CLASSES % 2}, "labels of shape (6,)"),
    "ViTForImageClassification": ({"labels": CLASSES}, "no padding token"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OWN)
def test_a_loss_of_a_models_own_keeps_its_head_whole_and_is_said_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Questions have two labels, and other classes compute their loss themselves."""
    labels, reason = OWN[name]
    made: Any = getattr(transformers, name)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape["num_labels"] = 2 if labels is PLACES else 3
    if name.startswith("ViT"):
        shape |= {"image_size": 16, "patch_size": 8}
        inputs = {"pixel_values": torch.rand(ROWS, 3, 16, 16).double()}
    else:
        shape |= {"vocab_size": VOCABULARY, "pad_token_id": 0, "use_cache": False}
        inputs = {"input_ids": IDS}
    torch.manual_seed(0)
    model = made(made.config_class(intermediate_size=64, **shape)).train().double()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    model.activation_checkpointing_enable({"use_reentrant": False})
    loss, expected = run(model, inputs | labels, 0)
    with caplog.at_level(logging.WARNING):
        found_loss, found = run(model, inputs | labels, 3)
    assert found_loss == pytest.approx(loss, rel=1e-12)
    assert_close(found, expected, rel=1e-9)
    (line,) = [line for line in caplog.messages if f"the head of {name} computes" in line]
    assert reason in line


def with_z_loss(function: Any) -> Any:
    """The decorator of a script."""

    @functools.wraps(function)
    def ForCausalLMLoss(*arguments: Any, **keywords: Any) -> torch.Tensor:
        z = keywords["logits"].logsumexp(-1).square().mean()
        return function(*arguments, **keywords) + 0.01 * z

    return ForCausalLMLoss


def test_a_loss_with_the_name_of_a_known_one_is_left_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model: Any = classifier(3, None, transformers.LlamaForCausalLM)
    ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH))
    inputs = {"input_ids": ids, "labels": ids}
    assert is_known(model.loss_function)
    model.loss_function = with_z_loss(model.loss_function)
    loss, expected = run(model, inputs, 0)
    with caplog.at_level(logging.WARNING):
        found_loss, found = run(model, inputs, 3)
    assert "its loss is not one of transformers' own ForCausalLMLoss" in caplog.text
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert_close(found, expected)
