#!/usr/bin/env python3
"""Writes a small model with random weights into a folder: the one that frameworks train.

python scripts/frameworks/model.py FOLDER            a Qwen3
python scripts/frameworks/model.py FOLDER qwen3_vl   a Qwen3-VL, with images and images.jsonl

Its tokenizer knows bytes and the tokens by which Qwen marks turns and images, since chat templates
of the frameworks have them. Run by `scripts/try_frameworks.py` in the environment of each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import transformers

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
import toy

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
IMAGES = {"red": (200, 30, 30), "green": (30, 160, 60), "blue": (40, 60, 200), "grey": (128,) * 3}
IMAGE_SIZES = ((64, 64), (96, 64))


def tokenizer(*more: str) -> transformers.PreTrainedTokenizerFast:
    """Return the tokenizer of the examples with Qwen's marks of turns, and more of them."""
    words = toy.tokenizer()
    words.add_special_tokens(
        {
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "additional_special_tokens": ["<|im_start|>", *more],
        }
    )
    words.chat_template = CHAT_TEMPLATE
    return words


def qwen3(folder: Path) -> None:
    """Write a Qwen3."""
    words = tokenizer()
    config = transformers.Qwen3Config(**toy.decoder(words) | {"head_dim": 64})
    toy.save(transformers.Qwen3ForCausalLM(config), words, folder)


def qwen3_vl(folder: Path) -> None:
    """Write a Qwen3-VL with its processor, and conversations about images of one colour."""
    words = tokenizer(*VISION_TOKENS)
    text = toy.decoder(words) | {"head_dim": 64}
    rotary = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [12, 10, 10]}
    vision = {
        "depth": 2,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_heads": 4,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    start, end, image, video = words.convert_tokens_to_ids(VISION_TOKENS)
    config = transformers.Qwen3VLConfig(
        text_config=text | {"rope_parameters": rotary | {"mrope_interleaved": True}},
        vision_config=vision,
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
    )
    shape = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    processor = transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(**shape),
        tokenizer=words,
        video_processor=transformers.Qwen3VLVideoProcessor(**shape),
        chat_template=CHAT_TEMPLATE,
    )
    toy.save(transformers.Qwen3VLForConditionalGeneration(config), processor, folder)
    write_images(folder)


def write_images(folder: Path) -> None:
    """Write images and what is said about them, in the form of LLaMA-Factory's data sets."""
    from PIL import Image

    rows = []
    for width, height in IMAGE_SIZES:
        for name, colour in IMAGES.items():
            path = folder / f"{name}-{width}.png"
            Image.new("RGB", (width, height), colour).save(path)
            question = {"role": "user", "content": "<image>What colour is it?"}
            answer = {"role": "assistant", "content": f"It is {name}."}
            rows.append({"messages": [question, answer], "images": [str(path)]})
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / "images.jsonl").write_text(text, encoding="utf-8")


MODELS: dict[str, Callable[[Path], None]] = {"qwen3": qwen3, "qwen3_vl": qwen3_vl}


def main() -> None:
    """Write the model that was named into the folder."""
    transformers.set_seed(1)
    MODELS[sys.argv[2] if len(sys.argv) > 2 else "qwen3"](Path(sys.argv[1]))


if __name__ == "__main__":
    main()
