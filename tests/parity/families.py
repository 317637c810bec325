"""Toy shapes of the model families that people train, with embeddings tied to the head and not.

A family's name is that of the model, a dash, and "tied" or "untied": "gemma-tied". Dropout is as
the family has it: equal bits need the same random numbers as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCABULARY = 2048
HIDDEN = 256
IMAGE_TOKEN = VOCABULARY  # no text has it
IMAGE_SIZE, PATCH_SIZE = 28, 14
IMAGE_TOKEN_COUNT = (IMAGE_SIZE // PATCH_SIZE) ** 2

DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 8 * HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,  # transformers clears its row, of which zero.Init has left nothing
    "use_cache": False,
}
HEAD = {"head_dim": HIDDEN // 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN}
#: Name: the model's class, its configuration's class, and the shape.
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", DECODER),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", DECODER | HEAD),
    "gemma": ("Gemma2ForCausalLM", "Gemma2Config", DECODER | HEAD),
    "phi": ("PhiForCausalLM", "PhiConfig", DECODER),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", DECODER),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        DECODER | {"num_local_experts": 4, "intermediate_size": HIDDEN},
    ),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        DECODER | EXPERTS | {"shared_expert_intermediate_size": 2 * HIDDEN},
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", DECODER | HEAD | EXPERTS),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": HIDDEN, "n_layer": 2, "n_head": 4},
    ),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        DECODER | {"ffn_dim": 8 * HIDDEN, "word_embed_proj_dim": HIDDEN},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", DECODER),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": HIDDEN,
            "d_kv": HIDDEN // 4,
            "d_ff": 8 * HIDDEN,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
            "use_cache": False,
        },
    ),
    "llava": ("LlavaForConditionalGeneration", "LlavaConfig", {}),
}
NAMES = tuple(f"{name}-{ending}" for name in SHAPES for ending in ("tied", "untied"))
TIED = ("qwen2", "gemma", "gpt2", "opt", "bert", "t5")
#: The heads with which the models of each family are published.
PUBLISHED = tuple(f"{name}-{'tied' if name in TIED else 'untied'}" for name in SHAPES)

#: Of those that Liger knows, one for each kind of head and layer. "llama" stands in the matrix;
#: the limit of Gemma's logits does not run in Triton's interpreter.
WITH_LIGER = ("qwen2-tied", "qwen3-untied", "phi3-untied", "mixtral-untied")


def maker(family: str) -> Callable[[], nn.Module]:
    """What builds a new model of `family`."""
    import transformers

    name, _, ending = family.partition("-")
    model, configuration, shape = SHAPES[name]
    is_tied = ending == "tied"
    if name == "llava":
        shape = {
            "text_config": transformers.LlamaConfig(
                **DECODER | {"vocab_size": VOCABULARY + 1}, tie_word_embeddings=is_tied
            ),
            "vision_config": transformers.CLIPVisionConfig(
                hidden_size=HIDDEN,
                intermediate_size=8 * HIDDEN,
                num_hidden_layers=1,
                num_attention_heads=4,
                image_size=IMAGE_SIZE,
                patch_size=PATCH_SIZE,
            ),
            "image_token_index": IMAGE_TOKEN,
            "vision_feature_layer": -1,
        }
    config = getattr(transformers, configuration)(**shape, tie_word_embeddings=is_tied)
    config.tie_word_embeddings = is_tied  # a T5's is always true at first
    return functools.partial(getattr(transformers, model), config)


def inputs(config: Any, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a model of this configuration is given: for each row of ids a target, or an image."""
    if getattr(config, "is_encoder_decoder", False):
        return {"input_ids": input_ids, "decoder_input_ids": input_ids}
    if not hasattr(config, "vision_config"):
        return {"input_ids": input_ids}
    rows = len(input_ids)
    image = torch.full((rows, IMAGE_TOKEN_COUNT), IMAGE_TOKEN, dtype=input_ids.dtype)
    shades = input_ids.float().mean(dim=1) / VOCABULARY
    pixels = torch.linspace(-1, 1, 3 * IMAGE_SIZE**2).view(1, 3, IMAGE_SIZE, IMAGE_SIZE)
    return {
        "input_ids": torch.cat([image.to(input_ids.device), input_ids], dim=1),
        "pixel_values": pixels.to(input_ids.device) * shades.view(rows, 1, 1, 1),
    }
