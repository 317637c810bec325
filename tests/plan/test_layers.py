"""What a layer saves, and what its backward pass takes: the formulae against layers that run."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from memascend.errors import ConfigError
from memascend.plan.context import LAYER_TENSORS
from memascend.plan.layers import FP32_BYTES, LOGITS_BYTES, Widths, layer_bytes

TOKENS = 120  # no tensor of a layer is then as large as a weight
WIDE = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
#: With dropout in attention sdpa has no kernel on the CPU that is linear in tokens, so it is off.
GPT2 = {
    "vocab_size": 96,
    "n_embd": 256,
    "n_layer": 2,
    "n_head": 8,
    "n_positions": TOKENS,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
QWEN3 = WIDE | {"head_dim": 64}  # twice the hidden size, as in the smallest of the family
QWEN3_MOE = QWEN3 | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
NARROW = WIDE | {"intermediate_size": 64}
#: On the CPU the masks of GPT-2's dropout are bf16 instead of bytes, its norms' numbers too.
MODELS: list[tuple[str, dict[str, Any], float]] = [
    ("llama", WIDE, 0.01),
    ("qwen2", WIDE, 0.01),
    ("qwen3", WIDE, 0.01),
    ("mistral", WIDE | {"head_dim": 64}, 0.01),
    ("mixtral", WIDE, 0.01),
    ("qwen3_moe", QWEN3_MOE, 0.01),
    ("gpt2", GPT2, 0.06),
]


def widths(model_type: str, numbers: dict[str, Any]) -> Widths:
    return Widths.from_config({"model_type": model_type, **numbers})


def built(model_type: str, numbers: dict[str, Any], dtype: str) -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **numbers)
    return transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).train()


def layer_of(model: Any, dtype: str) -> tuple[Any, Any, dict[str, Any]]:
    """Return a layer, its input, and what else it is called with."""
    import torch

    hidden = torch.randn(1, TOKENS, model.config.hidden_size, dtype=getattr(torch, dtype))
    if hasattr(model, "transformer"):
        return model.transformer.h[0], hidden, {}
    positions = model.model.rotary_emb(hidden, torch.arange(TOKENS)[None])
    return model.model.layers[0], hidden, {"position_embeddings": positions}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("model_type", "numbers", "tolerance"), MODELS)
def test_a_layer_saves_what_the_formula_says(
    model_type: str, numbers: dict[str, Any], tolerance: float, dtype: str
) -> None:
    model = built(model_type, numbers, dtype)
    layer, hidden, keywords = layer_of(model, dtype)
    from tests.support.live_bytes import saved_bytes

    constants = [*model.parameters(), *keywords.get("position_embeddings", ())]
    hidden = hidden.requires_grad_() * 1
    found = saved_bytes(lambda: layer(hidden, **keywords), without=constants)
    planned = layer_bytes(widths(model_type, numbers), hidden.element_size()).saved
    assert found / TOKENS == pytest.approx(planned, rel=tolerance)


@pytest.mark.parametrize(
    ("model_type", "numbers"),
    [("llama", WIDE), ("llama", NARROW), ("qwen3", QWEN3), ("mixtral", WIDE), ("gpt2", GPT2)],
)
def test_the_backward_pass_of_a_checkpointed_layer_takes_what_the_formula_says(
    model_type: str, numbers: dict[str, Any]
) -> None:
    """Besides the estimate its input is alive, the checkpoint, and so is the gradient it gets."""
    model = built(model_type, numbers, "bfloat16")
    layer, hidden, keywords = layer_of(model, "bfloat16")
    import torch
    from torch.utils.checkpoint import checkpoint

    from tests.support.live_bytes import LiveBytes

    with LiveBytes(weights=layer.parameters()) as live:
        output = checkpoint(layer, hidden.requires_grad_() * 1, use_reentrant=False, **keywords)
        gradient = torch.ones_like(output)
        live.peak = 0
        output.backward(gradient)
    bytes_of = layer_bytes(widths(model_type, numbers), 2)
    assert live.peak / TOKENS == pytest.approx(bytes_of.backward + 2 * bytes_of.hidden, rel=0.05)


class Ungathered:
    """Weights of a call in slices that nothing has to gather."""

    def __init__(self, _: Any) -> None: ...

    def in_forward(self) -> Any:
        return contextlib.nullcontext(lambda number: None)

    def in_backward(self, count: int) -> Any:
        return contextlib.nullcontext(lambda number: None)


@pytest.mark.parametrize("numbers", [WIDE, NARROW])
@pytest.mark.parametrize("count", [2, 8])
def test_a_layer_in_slices_takes_those_of_one_beside_tensors_of_the_whole_batch(
    numbers: dict[str, Any], count: int
) -> None:
    """They are its input, which is the checkpoint, and the gradients of input and output."""
    model = built("llama", numbers, "bfloat16")
    layer, _, keywords = layer_of(model, "bfloat16")
    import torch

    from memascend.slices.cut import Leaves
    from memascend.slices.layers import Batch, Slicer
    from tests.support.live_bytes import LiveBytes

    sequences = 4 * count
    hidden = torch.randn(sequences, TOKENS, model.config.hidden_size, dtype=torch.bfloat16)
    slicer = Slicer(Ungathered)
    with LiveBytes(weights=layer.parameters()) as live, slicer.slicing(Batch(sequences, count)):
        leaves = Leaves.of((hidden.requires_grad_() * 1,), keywords)
        loss = (slicer.run_module(layer, layer, leaves, pytest.fail, is_layer=True) * 1).sum()
        del leaves
        live.peak = 0
        loss.backward()
    bytes_of = layer_bytes(widths("llama", numbers), 2)
    planned = bytes_of.backward / count + (1 + LAYER_TENSORS) * bytes_of.hidden
    assert live.peak / TOKENS / sequences == pytest.approx(planned, rel=0.05)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_loss_takes_what_the_formula_says(dtype: str) -> None:
    vocabulary = 32_000
    model = built("llama", NARROW | {"vocab_size": vocabulary, "hidden_size": 32}, dtype)
    import torch

    from tests.support.live_bytes import LiveBytes

    tokens = torch.zeros(1, TOKENS, dtype=torch.long)
    with LiveBytes(weights=model.parameters()) as live:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        between = live.now
        loss.backward()
    assert live.peak / TOKENS / vocabulary == pytest.approx(LOGITS_BYTES, rel=0.05)
    assert between / TOKENS / vocabulary == pytest.approx(FP32_BYTES, rel=0.15)


def test_a_tiled_mlp_saves_its_input_alone() -> None:
    whole = layer_bytes(widths("llama", WIDE), 2)
    tiled = layer_bytes(widths("llama", WIDE), 2, has_tiled_mlp=True)
    assert whole.saved - tiled.saved == 4 * 2 * WIDE["intermediate_size"]
    assert tiled.backward < whole.backward
    assert (whole.tile, tiled.tile) == (0, 6 * 2 * WIDE["intermediate_size"])


def test_every_token_goes_to_its_experts() -> None:
    one = layer_bytes(widths("mixtral", WIDE | {"num_experts_per_tok": 1}), 2)
    two = layer_bytes(widths("mixtral", WIDE), 2)
    each = 4 * 2 * WIDE["intermediate_size"] + 2 * 2 * WIDE["hidden_size"] + 40
    assert two.saved - one.saved == each


def test_what_a_config_leaves_out_has_the_default_of_transformers() -> None:
    numbers = {key: WIDE[key] for key in WIDE if key != "num_key_value_heads"}
    found = widths("llama", numbers)
    assert (found.kv_heads, found.head_dim, found.experts) == (8, 32, 0)
    assert widths("qwen3", numbers).head_dim == 128
    gpt2 = widths("gpt2", {key: GPT2[key] for key in ("vocab_size", "n_embd", "n_layer")})
    assert (gpt2.heads, gpt2.inner, gpt2.is_gpt2) == (12, 1024, True)


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "vocab_size"])
def test_an_impossible_number_is_an_error_that_names_its_key(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be"):
        widths("llama", WIDE | {key: 0})
