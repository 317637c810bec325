"""Saved activations of a model's layers, in bytes per token, from its config.json alone.

Derived from the layers of transformers 5.23 (models/*/modeling_*.py); each storage counts once,
weights do not count. s is the bytes of an element, h the hidden size, q and k the widths of queries
and of keys (heads, key-value heads, each times the head's size), i the width of the MLP, e the
experts that a token goes to, of E in total. Attention is a flash or sdpa kernel, which is linear in
tokens; eager attention is quadratic in the context and not supported here.

| saved                                      | by                             | bytes           |
|--------------------------------------------|--------------------------------|-----------------|
| Llama, Qwen 2 and 3, Mistral, Mixtral      |                                |                 |
| input in fp32, 1 / its size (twice)        | RMSNorm: pow, mul, rsqrt       | 4 h + 4         |
| normalized, and times the weight (twice)   | mul; the next Linear           | 2 s h           |
| queries and keys in fp32, normalized       | RMSNorm of Qwen 3              | (4 + s)(q + k)  |
| 1 / their sizes                            | the same                       | 4 (heads + kv)  |
| queries, keys and values after rotary      | attention kernel               | s (q + 2 k)     |
| its output, log of the sums in fp32        | attention kernel, o_proj       | s q + 4 heads   |
| gate, its activation, up, their product    | silu, mul, down_proj           | 4 s i           |
| the same, Mixtral and Qwen 3 with experts  | grouped_mm, silu, mul          | 4 s i e         |
| inputs of experts, outputs before weights  | grouped_mm, mul                | 2 s h e         |
| probabilities, indices, weights            | router                         | 4 E + 40 e      |
| GPT-2                                      |                                |                 |
| input, mean, 1 / deviation (twice)         | LayerNorm                      | s h + 8         |
| its output (twice)                         | the next Conv1D                | s h             |
| queries, keys and values as one            | attention kernel               | 3 s h           |
| its output, log of the sums in fp32        | attention kernel, c_proj       | s h + 4 heads   |
| input, tanh, half the input, 1 + tanh      | gelu_new                       | 4 s i           |
| its output                                 | c_proj                         | s i             |
| masks (twice)                              | dropout                        | h               |

tests/plan/test_layers.py runs such layers and compares their saved and peak bytes with these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memascend.errors import ConfigError
from memascend.plan.architectures import is_known, numbers_of

FP32_BYTES = 4
#: Bytes of the loss per element of the logits: log_softmax saves its result in fp32, and its
#: backward pass also holds its incoming and outgoing gradient (transformers' ForCausalLMLoss).
LOGITS_BYTES = 3 * FP32_BYTES
#: Tensors in fp32 that the backward pass of an RMSNorm holds, besides its saved activations.
NORM_TENSORS = 5
#: Memory of a fused loss, in tensors as large as a hidden state: the gradient, and logits of one
#: chunk (Liger: at most twice tokens x hidden elements, ops/fused_linear_cross_entropy.py).
FUSED_LOSS_TENSORS = 3

#: Keys with the number of experts and the inner width of one, by architecture.
_EXPERTS = {
    "mixtral": ("num_local_experts", "intermediate_size"),
    "qwen3_moe": ("num_experts", "moe_intermediate_size"),
}
#: Architectures whose layers were not compared with the formulae.
_UNKNOWN = ("deepseek_v3", "gemma3_text", "gpt_oss", "llama4_text", "olmo2", "phi3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """The widths of a decoder."""

    layers: int
    hidden: int  # elements of a hidden state
    vocabulary: int  # elements of a token's logits
    heads: int  # heads of the queries
    kv_heads: int  # heads of the keys, and of the values
    head_dim: int  # elements of a head
    inner: int  # inner width of the MLP, or of one expert
    experts: int = 0  # number of experts; 0 for a dense MLP
    experts_per_token: int = 1  # experts that each token goes to
    has_qk_norm: bool = False  # whether queries and keys are normalized
    is_gpt2: bool = False  # whether norms, MLP and dropout are those of GPT-2

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Widths:
        """Read the content of a config.json.

        Raises:
            ConfigError: The architecture is unknown, or a number is out of range.
        """
        if not is_known(config) or config["model_type"] in _UNKNOWN:
            raise ConfigError(
                f"the saved activations of model_type={config.get('model_type')!r} are not known, "
                "so device memory and context cannot be planned; host memory, drive and traffic "
                "can: leave out --context and --fit"
            )
        numbers = numbers_of(config)
        if numbers.model_type == "gpt2":
            hidden, heads = numbers.count("n_embd"), numbers.count("n_head", default=12)
            return cls(
                layers=numbers.count("n_layer"),
                hidden=hidden,
                vocabulary=numbers.count("vocab_size"),
                heads=heads,
                kv_heads=heads,
                head_dim=max(1, hidden // heads),
                inner=numbers.count("n_inner", default=4 * hidden),
                is_gpt2=True,
            )
        hidden, heads = numbers.count("hidden_size"), numbers.count("num_attention_heads")
        experts_key, inner_key = _EXPERTS.get(numbers.model_type, ("", "intermediate_size"))
        return cls(
            layers=numbers.count("num_hidden_layers"),
            hidden=hidden,
            vocabulary=numbers.count("vocab_size"),
            heads=heads,
            kv_heads=numbers.count("num_key_value_heads", default=heads),
            head_dim=numbers.count("head_dim", default=max(1, hidden // heads)),
            inner=numbers.count(inner_key),
            experts=numbers.count(experts_key) if experts_key else 0,
            experts_per_token=numbers.count("num_experts_per_tok") if experts_key else 1,
            has_qk_norm=numbers.flag("qk_norm"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes per token of one layer; all but `hidden` are estimates."""

    hidden: int  # its input, which is the checkpoint of the layer
    saved: int  # all its saved activations
    largest: int  # the largest saved tensor
    backward: int  # peak of its backward pass, remaining saved activations included
    gradients: int  # peak of its backward pass without saved activations
    tile: int  # with a tiled MLP, bytes in backward per token of the current tile
    final_norm: int  # saved activations of the norm after the last layer
    final_norm_largest: int  # the largest of these


def layer_bytes(widths: Widths, itemsize: int, *, has_tiled_mlp: bool = False) -> LayerBytes:
    """Return the bytes per token of a layer.

    The peak of its backward pass is in the MLP, with all saved activations and the gradients of the
    two widest tensors, of the input and of the output. If the MLP is narrow or tiled, the peak is
    in the norm before it, which computes in fp32 after the MLP's part is freed. A tiled MLP
    processes its tokens in tiles and is recomputed in backward, so that it saves only its input.
    """
    hidden = itemsize * widths.hidden
    inner = itemsize * widths.inner * widths.experts_per_token
    wide = 2 * inner
    if widths.is_gpt2:
        norm_largest, largest = hidden, max(inner, 3 * hidden)
        norm, norm_backward = 2 * hidden + 8, 2 * hidden
        rest = 2 * norm + 4 * hidden + 4 * widths.heads + 2 * widths.hidden
        mlp = 5 * inner
    else:
        norm_largest = FP32_BYTES * widths.hidden
        largest = max(norm_largest, inner * (2 if widths.experts else 1))
        norm, norm_backward = norm_largest + 4 + 2 * hidden, NORM_TENSORS * norm_largest
        rest = 2 * norm + _attention(widths, itemsize)
        mlp = 4 * inner
    if widths.experts:
        rest += 4 * widths.experts + 40 * widths.experts_per_token
        mlp += 2 * hidden * widths.experts_per_token
        # The experts' outputs are multiplied by their weights in fp32.
        wide = max(wide, 3 * norm_largest * widths.experts_per_token)
    saved = rest if has_tiled_mlp else rest + mlp
    in_mlp = 2 * hidden + (0 if has_tiled_mlp else wide)
    return LayerBytes(
        hidden=hidden,
        saved=saved,
        largest=largest,
        backward=max(saved + in_mlp, rest + norm_backward),
        gradients=max(in_mlp, norm_backward + hidden),
        tile=mlp + wide if has_tiled_mlp else 0,
        final_norm=norm,
        final_norm_largest=norm_largest,
    )


def _attention(widths: Widths, itemsize: int) -> int:
    """Return the bytes that attention with rotary positions saves, with its norms."""
    queries, keys = widths.heads * widths.head_dim, widths.kv_heads * widths.head_dim
    saved = itemsize * (2 * queries + 2 * keys) + 4 * widths.heads
    if widths.has_qk_norm:
        saved += (FP32_BYTES + itemsize) * (queries + keys) + 4 * (widths.heads + widths.kv_heads)
    return saved
