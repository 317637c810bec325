"""Models of an encoder and a decoder: layers of both run in slices, and the head stays whole."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from tests.support.sliced_models import ROWS, assert_close, run

VOCABULARY, WIDTH, LAYERS, COUNT = 64, 32, 2, 3
LENGTH, ANSWER = 16, 12  # tokens of a row, and of its answer
WHOLE = " computes the whole batch at once: "
LEARNED = {"BartLearnedPositionalEmbedding"}  # positions of all sequences
HALF = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_attention_heads": 4,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 2,
    "head_dim": WIDTH // 4,
    "vocab_size": VOCABULARY,
    "use_cache": False,
}
BOTH = {
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH,
    "vocab_size": VOCABULARY,
    "use_cache": False,
    "dropout": 0.0,
}


def bart() -> Any:
    config = transformers.BartConfig(**BOTH, max_position_embeddings=LENGTH)
    return transformers.BartForConditionalGeneration(config)


def whisper() -> Any:
    tokens = {"pad_token_id": 0, "decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.WhisperConfig(**BOTH, num_mel_bins=8, max_source_positions=10, **tokens)
    return transformers.WhisperForConditionalGeneration(config)


def t5gemma() -> Any:
    config = transformers.T5GemmaConfig(
        encoder=HALF, decoder=HALF, vocab_size=VOCABULARY, dropout_rate=0.0
    )
    return transformers.T5GemmaForConditionalGeneration(config)


def rows_of(model: Any) -> dict[str, torch.Tensor]:
    """Padded rows, or sounds, and answers of another length."""
    answers = torch.randint(3, VOCABULARY, (ROWS, ANSWER))
    answers[1, 8:] = -100
    if model.main_input_name == "input_features":
        return {"input_features": torch.randn(ROWS, 8, 20).double(), "labels": answers}
    mask = torch.ones(ROWS, LENGTH).long()
    mask[2, 10:] = mask[5, 3:] = 0
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    return {"input_ids": ids, "attention_mask": mask, "labels": answers}


@pytest.mark.parametrize("maker", [bart, whisper, t5gemma])
def test_layers_of_both_halves_are_cut_and_the_head_is_whole(
    maker: Callable[[], Any], passes: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = maker().double().train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    inputs = rows_of(model)
    loss, expected = run(model, inputs, 0)
    with caplog.at_level(logging.WARNING):
        found_loss, found = run(model, inputs, COUNT)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert_close(found, expected)
    for phase in ("forward", "backward"):
        # An embedding and a norm of each half as well, or a norm of embeddings.
        assert passes.count((phase, list(range(COUNT)))) == 2 * LAYERS + 4
    lines = [one for one in caplog.messages if WHOLE in one]
    whole = {one.split(WHOLE)[0].removeprefix("memascend: ") for one in lines}
    assert whole - LEARNED == {f"the head of {type(model).__name__}"}
    assert "also returns encoder_last_hidden_state" in lines[-1]
