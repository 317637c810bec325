#!/usr/bin/env python3
"""Writes a small Qwen3 with random weights into a folder: the model that frameworks train.

python scripts/frameworks/model.py FOLDER

Its tokenizer knows bytes and the tokens by which Qwen marks turns, since chat templates of the
frameworks have them. Run by `scripts/try_frameworks.py` in the environment of each framework.
"""

from __future__ import annotations

import sys
from pathlib import Path

import transformers

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
import toy

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    """Write the model into the folder that was named."""
    transformers.set_seed(1)
    words = toy.tokenizer()
    words.add_special_tokens(
        {
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "additional_special_tokens": ["<|im_start|>"],
        }
    )
    words.chat_template = CHAT_TEMPLATE
    config = transformers.Qwen3Config(**toy.decoder(words) | {"head_dim": 64})
    toy.save(transformers.Qwen3ForCausalLM(config), words, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
