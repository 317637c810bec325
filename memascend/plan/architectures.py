"""The tensors of a Hugging Face model, from the numbers in its config.json alone.

Each architecture yields every parameter with its name, shape and order in transformers 5 (experts
fused into one tensor per layer), so that DeepSpeed would cut the same sub-groups from that order.
Pure; knows neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from memascend.base.json_text import show_json
from memascend.errors import ConfigError

#: Far above any model; a config.json with more would only cost memory and time.
LAYER_COUNT_MAX = 10_000
COUNT_MAX = 1 << 40
_LAYER_KEYS = ("num_hidden_layers", "n_layer")

Shape = tuple[int, ...]
Tensors = Iterator[tuple[str, Shape]]
#: The norms of a layer: before attention and MLP, after them, or both.
_NORMS = ("input_layernorm", "post_attention_layernorm")
_NORMS_AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")
_NORMS_AROUND = (*_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def tensors_of(config: Mapping[str, Any]) -> tuple[list[tuple[str, Shape]], dict[str, str]]:
    """Return every (name, shape), and tied weights as name -> name of the tensor it shares.

    Raises:
        ConfigError: The architecture is unknown, or a number is missing or out of range.
    """
    numbers = numbers_of(config)
    tensors = list(_ARCHITECTURES[numbers.model_type](numbers))
    embedding = tensors[0][0]
    if numbers.flag("tie_word_embeddings"):
        return tensors, {"lm_head.weight": embedding}
    return [*tensors, ("lm_head.weight", tensors[0][1])], {}


def is_known(config: Mapping[str, Any]) -> bool:
    """Return whether the architecture of a config.json is known here."""
    model_type = config.get("model_type")
    return isinstance(model_type, str) and model_type in _ARCHITECTURES


def numbers_of(config: Mapping[str, Any]) -> Numbers:
    """Return the numbers of a config.json; raise ConfigError if its architecture is unknown."""
    model_type = config.get("model_type")
    if not is_known(config):
        raise ConfigError(
            f"cannot derive the tensors of a config.json with model_type={show_json(model_type)}. "
            f"Known: {', '.join(sorted(_ARCHITECTURES))}; where transformers is installed, all "
            "that it knows. Other ways that work for every model: a .safetensors file, index or "
            "folder, or shapes.from_module(module) in a program"
        )
    return Numbers(str(model_type), config, _DEFAULTS[str(model_type)])


class Numbers:
    """The numbers of a config.json; missing or null ones have transformers' defaults."""

    def __init__(
        self, model_type: str, config: Mapping[str, Any], defaults: Mapping[str, Any]
    ) -> None:
        self.model_type = model_type
        self._config = config
        self._defaults = defaults

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a whole number of at least `least`; raise ConfigError for any other value."""
        value = self._value(key, default)
        maximum = LAYER_COUNT_MAX if key in _LAYER_KEYS else COUNT_MAX
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= maximum:
            raise ConfigError(
                f"config.json: {key} must be a whole number of at least {least} and at most "
                f"{maximum}, got {show_json(value)}. Is this the config.json of the model itself?"
            )
        return value

    def flag(self, key: str) -> bool:
        """Return true or false, false if the key is missing; raise ConfigError for other values."""
        value = self._value(key, False)
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {key} must be true or false, got {show_json(value)}")
        return value

    def is_null(self, key: str) -> bool:
        """Return whether a key is there without a value."""
        return key in self._config and self._config[key] is None

    def check(self, key: str, only: object) -> None:
        """Raise ConfigError if a key states another value than the only one that is known here."""
        if (value := self._value(key, only)) != only:
            raise ConfigError(
                f"config.json: {key}={show_json(value)} is not known here, only {only!r}. Give the "
                "model's .safetensors file or folder instead"
            )

    def _value(self, key: str, default: Any) -> Any:
        value = self._config.get(key)
        if value is None:
            value = self._defaults.get(key)
        return default if value is None else value


#: Yields the tensors of one part of a layer below a prefix of their names.
Parts = Callable[[Numbers, str], Tensors]


def _decoder(
    numbers: Numbers,
    mlp: Parts,
    attention: Parts | None = None,
    norms: tuple[str, ...] = _NORMS,
    mlp_name: str = "mlp",
    dense_key: str = "",
) -> Tensors:
    """Yield the tensors of a decoder; families differ in attention, MLP and norms of a layer.

    If `dense_key` is given, the first layers, of that number, have no experts.
    """
    hidden = numbers.count("hidden_size")
    yield "model.embed_tokens.weight", (numbers.count("vocab_size"), hidden)
    dense = numbers.count(dense_key, least=0) if dense_key else 0
    for layer in range(numbers.count("num_hidden_layers")):
        prefix = f"model.layers.{layer}"
        yield from (attention or _attention)(numbers, f"{prefix}.self_attn")
        yield from (_dense if layer < dense else mlp)(numbers, f"{prefix}.{mlp_name}")
        for norm in norms:
            yield f"{prefix}.{norm}.weight", (hidden,)
    yield "model.norm.weight", (hidden,)


def _attention(numbers: Numbers, prefix: str) -> Tensors:
    hidden = numbers.count("hidden_size")
    heads = numbers.count("num_attention_heads")
    head_dim = numbers.count("head_dim", default=hidden // heads)
    queries = heads * head_dim
    keys = numbers.count("num_key_value_heads", default=heads) * head_dim
    has_bias, has_output_bias = numbers.flag("qkv_bias"), False
    if numbers.flag("attention_bias_allowed"):
        has_bias = has_output_bias = numbers.flag("attention_bias")
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield from _linear(f"{prefix}.{name}", rows, hidden, has_bias)
    yield from _linear(f"{prefix}.o_proj", hidden, queries, has_output_bias)
    if numbers.flag("qk_norm"):
        is_wide = numbers.flag("qk_norm_over_heads")
        yield f"{prefix}.q_norm.weight", (queries if is_wide else head_dim,)
        yield f"{prefix}.k_norm.weight", (keys if is_wide else head_dim,)


def _attention_with_sinks(numbers: Numbers, prefix: str) -> Tensors:
    yield f"{prefix}.sinks", (numbers.count("num_attention_heads"),)
    yield from _attention(numbers, prefix)


def _latent_attention(numbers: Numbers, prefix: str) -> Tensors:
    """Yield DeepSeek's attention, whose queries, keys and values go through narrow projections."""
    numbers.check("attention_bias", False)
    hidden, heads = numbers.count("hidden_size"), numbers.count("num_attention_heads")
    rope, plain = numbers.count("qk_rope_head_dim"), numbers.count("qk_nope_head_dim")
    values, narrow = numbers.count("v_head_dim"), numbers.count("kv_lora_rank")
    if numbers.is_null("q_lora_rank"):
        yield f"{prefix}.q_proj.weight", (heads * (rope + plain), hidden)
    else:
        rank = numbers.count("q_lora_rank")
        yield f"{prefix}.q_a_proj.weight", (rank, hidden)
        yield f"{prefix}.q_a_layernorm.weight", (rank,)
        yield f"{prefix}.q_b_proj.weight", (heads * (rope + plain), rank)
    yield f"{prefix}.kv_a_proj_with_mqa.weight", (narrow + rope, hidden)
    yield f"{prefix}.kv_a_layernorm.weight", (narrow,)
    yield f"{prefix}.kv_b_proj.weight", (heads * (plain + values), narrow)
    yield f"{prefix}.o_proj.weight", (hidden, heads * values)


def _fused_attention(numbers: Numbers, prefix: str) -> Tensors:
    hidden = numbers.count("hidden_size")
    heads = numbers.count("num_attention_heads")
    head_dim = numbers.count("head_dim", default=hidden // heads)
    keys = numbers.count("num_key_value_heads", default=heads) * head_dim
    yield f"{prefix}.o_proj.weight", (hidden, heads * head_dim)
    yield f"{prefix}.qkv_proj.weight", (heads * head_dim + 2 * keys, hidden)


def _dense(numbers: Numbers, prefix: str) -> Tensors:
    hidden, inner = numbers.count("hidden_size"), numbers.count("intermediate_size")
    has_bias = numbers.flag("mlp_bias_allowed") and numbers.flag("mlp_bias")
    yield from _gated(prefix, inner, hidden, has_bias)


def _gated(prefix: str, inner: int, hidden: int, has_bias: bool = False) -> Tensors:
    yield from _linear(f"{prefix}.gate_proj", inner, hidden, has_bias)
    yield from _linear(f"{prefix}.up_proj", inner, hidden, has_bias)
    yield from _linear(f"{prefix}.down_proj", hidden, inner, has_bias)


def _fused_dense(numbers: Numbers, prefix: str) -> Tensors:
    hidden, inner = numbers.count("hidden_size"), numbers.count("intermediate_size")
    yield f"{prefix}.gate_up_proj.weight", (2 * inner, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, inner)


def _experts(numbers: Numbers, prefix: str) -> Tensors:
    hidden, inner = numbers.count("hidden_size"), numbers.count("intermediate_size")
    experts = numbers.count("num_local_experts")
    yield f"{prefix}.gate.weight", (experts, hidden)
    yield f"{prefix}.experts.gate_up_proj", (experts, 2 * inner, hidden)
    yield f"{prefix}.experts.down_proj", (experts, hidden, inner)


def _narrow_experts(numbers: Numbers, prefix: str) -> Tensors:
    """Yield the experts of Qwen 3; layers without experts are not known here."""
    numbers.check("decoder_sparse_step", 1)
    numbers.check("mlp_only_layers", [])
    hidden, inner = numbers.count("hidden_size"), numbers.count("moe_intermediate_size")
    experts = numbers.count("num_experts")
    yield f"{prefix}.experts.gate_up_proj", (experts, 2 * inner, hidden)
    yield f"{prefix}.experts.down_proj", (experts, hidden, inner)
    yield f"{prefix}.gate.weight", (experts, hidden)


def _shared_experts(numbers: Numbers, prefix: str) -> Tensors:
    """Yield DeepSeek's experts, and those that every token goes to."""
    hidden, inner = numbers.count("hidden_size"), numbers.count("moe_intermediate_size")
    experts, shared = numbers.count("n_routed_experts"), numbers.count("n_shared_experts")
    yield f"{prefix}.experts.gate_up_proj", (experts, 2 * inner, hidden)
    yield f"{prefix}.experts.down_proj", (experts, hidden, inner)
    yield f"{prefix}.gate.weight", (experts, hidden)
    yield from _gated(f"{prefix}.shared_experts", shared * inner, hidden)


def _experts_and_one(numbers: Numbers, prefix: str) -> Tensors:
    """Yield the experts of Llama 4; layers without experts are not known here."""
    numbers.check("interleave_moe_layer_step", 1)
    hidden, inner = numbers.count("hidden_size"), numbers.count("intermediate_size")
    experts = numbers.count("num_local_experts")
    yield f"{prefix}.experts.gate_up_proj", (experts, hidden, 2 * inner)
    yield f"{prefix}.experts.down_proj", (experts, inner, hidden)
    yield f"{prefix}.router.weight", (experts, hidden)
    yield from _gated(f"{prefix}.shared_expert", inner, hidden)


def _experts_with_bias(numbers: Numbers, prefix: str) -> Tensors:
    hidden, inner = numbers.count("hidden_size"), numbers.count("intermediate_size")
    experts = numbers.count("num_local_experts")
    yield from _linear(f"{prefix}.router", experts, hidden, has_bias=True)
    yield f"{prefix}.experts.gate_up_proj", (experts, hidden, 2 * inner)
    yield f"{prefix}.experts.gate_up_proj_bias", (experts, 2 * inner)
    yield f"{prefix}.experts.down_proj", (experts, inner, hidden)
    yield f"{prefix}.experts.down_proj_bias", (experts, hidden)


def _gpt2(numbers: Numbers) -> Tensors:
    if numbers.flag("add_cross_attention"):
        raise ConfigError(
            "config.json: add_cross_attention=true is not known here. Give the model's "
            ".safetensors file or folder instead"
        )
    hidden = numbers.count("n_embd")
    inner = numbers.count("n_inner", default=4 * hidden)
    yield "transformer.wte.weight", (numbers.count("vocab_size"), hidden)
    yield "transformer.wpe.weight", (numbers.count("n_positions"), hidden)
    for layer in range(numbers.count("n_layer")):
        prefix = f"transformer.h.{layer}"
        yield from _layer_norm(f"{prefix}.ln_1", hidden)
        yield from _conv1d(f"{prefix}.attn.c_attn", hidden, 3 * hidden)
        yield from _conv1d(f"{prefix}.attn.c_proj", hidden, hidden)
        yield from _layer_norm(f"{prefix}.ln_2", hidden)
        yield from _conv1d(f"{prefix}.mlp.c_fc", hidden, inner)
        yield from _conv1d(f"{prefix}.mlp.c_proj", inner, hidden)
    yield from _layer_norm("transformer.ln_f", hidden)


def _linear(name: str, rows: int, columns: int, has_bias: bool) -> Tensors:
    yield f"{name}.weight", (rows, columns)
    if has_bias:
        yield f"{name}.bias", (rows,)


def _conv1d(name: str, rows: int, columns: int) -> Tensors:
    yield f"{name}.weight", (rows, columns)
    yield f"{name}.bias", (columns,)


def _layer_norm(name: str, size: int) -> Tensors:
    yield f"{name}.weight", (size,)
    yield f"{name}.bias", (size,)


_ARCHITECTURES: dict[str, Callable[[Numbers], Tensors]] = {
    "llama": lambda numbers: _decoder(numbers, _dense),
    "qwen2": lambda numbers: _decoder(numbers, _dense),
    "qwen3": lambda numbers: _decoder(numbers, _dense),
    "mistral": lambda numbers: _decoder(numbers, _dense),
    "mixtral": lambda numbers: _decoder(numbers, _experts),
    "qwen3_moe": lambda numbers: _decoder(numbers, _narrow_experts),
    "gpt_oss": lambda numbers: _decoder(numbers, _experts_with_bias, _attention_with_sinks),
    "phi3": lambda numbers: _decoder(numbers, _fused_dense, _fused_attention),
    "olmo2": lambda numbers: _decoder(numbers, _dense, norms=_NORMS_AFTER),
    "gemma3_text": lambda numbers: _decoder(numbers, _dense, norms=_NORMS_AROUND),
    "deepseek_v3": lambda numbers: _decoder(
        numbers, _shared_experts, _latent_attention, dense_key="first_k_dense_replace"
    ),
    "llama4_text": lambda numbers: _decoder(numbers, _experts_and_one, mlp_name="feed_forward"),
    "gpt2": _gpt2,
}

# transformers' defaults for keys missing in a config.json, and fixed facts of the architecture.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias_allowed": True, "mlp_bias_allowed": True},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"attention_bias_allowed": True, "qk_norm": True, "head_dim": 128},
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "attention_bias_allowed": True,
        "qk_norm": True,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "gpt_oss": {
        "attention_bias_allowed": True,
        "attention_bias": True,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
    },
    "phi3": {},
    "olmo2": {"attention_bias_allowed": True, "qk_norm": True, "qk_norm_over_heads": True},
    "gemma3_text": {
        "attention_bias_allowed": True,
        "qk_norm": True,
        "head_dim": 256,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    "deepseek_v3": {
        "num_attention_heads": 128,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
    },
    "llama4_text": {
        "attention_bias_allowed": True,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 16,
    },
    "gpt2": {"tie_word_embeddings": True, "n_positions": 1024},
}
