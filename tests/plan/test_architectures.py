"""Architectures: a config.json gives the tensors that transformers builds, or an error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from memascend.errors import ConfigError
from memascend.plan.architectures import LAYER_COUNT_MAX, numbers_of, tensors_of
from memascend.plan.shapes import from_module
from tests.support.plan_models import SMALL

GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
LATENT = SMALL | {
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 4,
    "v_head_dim": 12,
}
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", SMALL),
    ("llama", SMALL | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", SMALL | {"num_key_value_heads": None, "head_dim": 16}),
    ("qwen2", SMALL),
    ("qwen2", SMALL | {"tie_word_embeddings": True}),
    ("qwen3", SMALL),
    ("qwen3", SMALL | {"head_dim": 8, "attention_bias": True}),
    ("mistral", SMALL | {"head_dim": 16}),
    (
        "mistral",
        {key: SMALL[key] for key in SMALL if key != "num_key_value_heads"}
        | {"hidden_size": 64, "num_attention_heads": 8},
    ),
    ("mixtral", SMALL | {"num_local_experts": 4}),
    ("mixtral", SMALL),
    ("qwen3_moe", SMALL | {"num_experts": 4, "moe_intermediate_size": 24}),
    ("qwen3_moe", SMALL | {"head_dim": 16, "attention_bias": True}),
    ("gpt_oss", SMALL | {"num_local_experts": 4}),
    ("gpt_oss", SMALL | {"attention_bias": False, "head_dim": 16}),
    ("phi3", SMALL | {"pad_token_id": 0}),
    ("olmo2", SMALL),
    ("olmo2", SMALL | {"attention_bias": True}),
    ("gemma3_text", SMALL),
    ("gemma3_text", SMALL | {"head_dim": 16, "tie_word_embeddings": False}),
    ("deepseek_v3", LATENT),
    ("deepseek_v3", LATENT | {"q_lora_rank": None, "n_shared_experts": 2}),
    ("deepseek_v3", LATENT | {"first_k_dense_replace": 0}),
    ("llama4_text", SMALL | {"num_local_experts": 4}),
    ("llama4_text", SMALL | {"head_dim": 16, "tie_word_embeddings": True}),
    ("gpt2", GPT2),
    ("gpt2", GPT2 | {"n_inner": 40, "tie_word_embeddings": False}),
]


@pytest.mark.parametrize(("model_type", "numbers"), CONFIGS)
def test_a_config_gives_the_tensors_that_transformers_builds(
    model_type: str, numbers: dict[str, Any]
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(model_type, **numbers)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    built = from_module(model)
    tensors, tied = tensors_of({"model_type": model_type, **numbers})
    assert tensors == [(tensor.name, tensor.shape) for tensor in built.tensors]
    assert tied == built.tied


def test_null_is_what_is_left_out() -> None:
    config = {"model_type": "mixtral", **SMALL}
    del config["num_key_value_heads"]
    nulls = dict.fromkeys(("num_key_value_heads", "num_local_experts", "tie_word_embeddings"))
    assert tensors_of(config | nulls) == tensors_of(config)


@pytest.mark.parametrize("model_type", ["bert", "", "Llama", ["llama"], {}, None, 7])
def test_an_unknown_architecture_names_the_known_ones_and_the_other_ways(
    model_type: object,
) -> None:
    with pytest.raises(
        ConfigError, match=r"gpt2, gpt_oss, llama.*safetensors.*from_module"
    ) as caught:
        tensors_of({"model_type": model_type, **SMALL})
    assert f"model_type={json.dumps(model_type)}" in str(caught.value)


def test_the_numbers_of_a_config_have_the_defaults_of_transformers() -> None:
    numbers = numbers_of({"model_type": "mixtral", **SMALL, "num_key_value_heads": None})
    assert (numbers.model_type, numbers.count("num_experts_per_tok")) == ("mixtral", 2)
    assert numbers.count("num_key_value_heads") == 8
    assert not numbers.flag("tie_word_embeddings")


@pytest.mark.parametrize("value", [0, -1, "32", 3.5, True, [32], 1 << 41])
def test_an_impossible_number_is_an_error_that_names_its_key(value: object) -> None:
    with pytest.raises(ConfigError, match="hidden_size must be"):
        tensors_of({"model_type": "llama", **SMALL, "hidden_size": value})


def test_a_missing_number_is_an_error() -> None:
    with pytest.raises(ConfigError, match="hidden_size must be"):
        tensors_of({"model_type": "llama"})


@pytest.mark.parametrize(
    ("model_type", "key"),
    [
        ("llama", "attention_bias"),
        ("qwen2", "tie_word_embeddings"),
        ("gpt2", "add_cross_attention"),
    ],
)
@pytest.mark.parametrize("value", ["yes", 1, []])
def test_a_switch_is_true_or_false(model_type: str, key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be true or false"):
        tensors_of({"model_type": model_type, **SMALL, **GPT2, key: value})


def test_what_an_architecture_does_not_have_is_not_looked_at() -> None:
    """Only Llama and Qwen 3 say themselves whether attention has a bias, only Llama of its MLP."""
    plain = tensors_of({"model_type": "mistral", **SMALL})
    more = {"attention_bias": "no", "mlp_bias": True}
    assert tensors_of({"model_type": "mistral", **SMALL, **more}) == plain


@pytest.mark.parametrize(
    ("key", "value"), [("decoder_sparse_step", 2), ("mlp_only_layers", [0, 3])]
)
def test_layers_without_experts_are_refused_with_another_way(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{key}=.*safetensors"):
        tensors_of({"model_type": "qwen3_moe", **SMALL, key: value})


def test_cross_attention_is_refused_with_another_way() -> None:
    with pytest.raises(ConfigError, match=r"add_cross_attention.*safetensors"):
        tensors_of({"model_type": "gpt2", **GPT2, "add_cross_attention": True})


@pytest.mark.parametrize(
    ("model_type", "key"), [("llama", "num_hidden_layers"), ("gpt2", "n_layer")]
)
def test_more_layers_than_any_model_has_take_no_memory(model_type: str, key: str) -> None:
    config = {"model_type": model_type, **SMALL, **GPT2}
    with pytest.raises(ConfigError, match=f"{key} must be"):
        tensors_of(config | {key: LAYER_COUNT_MAX + 1})
