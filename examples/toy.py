#!/usr/bin/env python3
"""Writes small models with random weights, on which every example can be tried without a download.

python examples/toy.py            writes toy/llama, toy/wide, toy/mixtral, toy/t5 and toy/llava
python examples/toy.py t5         writes toy/t5 alone

Each folder is what `from_pretrained` expects: configuration, weights and tokenizer. The tokenizer
knows no words, only bytes. Every tensor of weight is just large enough to be offloaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import tokenizers
import torch
import transformers

VOCABULARY = 4096
IMAGE_SIZE, PATCH_SIZE = 56, 14
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each byte, and those that mark turns and images."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    known = tokenizers.models.BPE({letter: index for index, letter in enumerate(letters)}, [])
    inner = tokenizers.Tokenizer(known)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<|user|>", "<|assistant|>", "<image>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    )


def decoder(words: transformers.PreTrainedTokenizerFast) -> dict[str, object]:
    """Return the shape that the toys of Llama's kind share."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 2048,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "eos_token_id": words.eos_token_id,
        "pad_token_id": words.pad_token_id,
        "bos_token_id": None,
    }


def llama(folder: Path) -> None:
    """Write a decoder of Llama's kind."""
    words = tokenizer()
    save(transformers.LlamaForCausalLM(transformers.LlamaConfig(**decoder(words))), words, folder)


def wide(folder: Path) -> None:
    """Write one whose largest weights are large enough in four bits, too."""
    words = tokenizer()
    config = transformers.LlamaConfig(**decoder(words) | {"intermediate_size": 8192})
    save(transformers.LlamaForCausalLM(config), words, folder)


def mixtral(folder: Path) -> None:
    """Write a mixture of four experts."""
    words = tokenizer()
    experts = {"intermediate_size": 512, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.MixtralConfig(**decoder(words) | experts, output_router_logits=True)
    save(transformers.MixtralForCausalLM(config), words, folder)


def t5(folder: Path) -> None:
    """Write an encoder-decoder of T5's kind."""
    words = tokenizer()
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=256,
        d_kv=64,
        d_ff=2048,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        pad_token_id=words.pad_token_id,
        eos_token_id=words.eos_token_id,
        decoder_start_token_id=words.pad_token_id,
    )
    save(transformers.T5ForConditionalGeneration(config), words, folder)


def llava(folder: Path) -> None:
    """Write a vision-language model of LLaVA's kind, with its image processor."""
    words = tokenizer()
    vision = transformers.CLIPVisionConfig(
        hidden_size=256,
        intermediate_size=2048,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**decoder(words)),
        image_token_index=words.convert_tokens_to_ids("<image>"),
        pad_token_id=words.pad_token_id,
        vision_feature_layer=-1,
    )
    images = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": IMAGE_SIZE}, crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    )
    processor = transformers.LlavaProcessor(
        image_processor=images,
        tokenizer=words,
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )
    save(transformers.LlavaForConditionalGeneration(config), processor, folder)


def save(
    model: transformers.PreTrainedModel, processor: transformers.ProcessorMixin, folder: Path
) -> None:
    """Write the model in bf16, and what turns text and images into its input."""
    model.to(torch.bfloat16).save_pretrained(folder)
    processor.save_pretrained(folder)
    print(f"{folder}: {model.num_parameters():,} parameters")


TOYS: dict[str, Callable[[Path], None]] = {
    "llama": llama,
    "wide": wide,
    "mixtral": mixtral,
    "t5": t5,
    "llava": llava,
}


def main() -> None:
    """Write the toys that were asked for, or all."""
    parser = argparse.ArgumentParser(description="Write small models with random weights.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(TOYS)}")
    parser.add_argument("--folder", type=Path, default=Path("toy"))
    args = parser.parse_args()
    unknown = set(args.names) - set(TOYS)
    if unknown:
        parser.error(f"no toy called {', '.join(sorted(unknown))}; there are: {', '.join(TOYS)}")
    for name in args.names or TOYS:
        transformers.set_seed(1)
        TOYS[name](args.folder / name)


if __name__ == "__main__":
    main()
