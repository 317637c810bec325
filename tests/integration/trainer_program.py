"""A user's script with Hugging Face's Trainer: knows the DeepSpeed JSON only, as any such script.

Usage: trainer_program.py DEEPSPEED_JSON OUTPUT_FOLDER
"""

from __future__ import annotations

import sys
import time

import torch
import transformers
from transformers import Trainer

ROWS = 8
COLUMNS = 32
VOCABULARY = 4096


class Rows(torch.utils.data.Dataset):
    """Random token rows, the same in every run."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self._ids = torch.randint(VOCABULARY, (ROWS, COLUMNS), generator=generator)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


def main() -> None:
    config, folder = sys.argv[1:3]
    # Before the model, so that transformers builds it under zero.Init.
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        deepspeed=config,
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        learning_rate=1e-3,
        max_grad_norm=1.0,
        bf16=True,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=11,
    )
    transformers.set_seed(11)
    shape = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=2048,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows())
    trainer.train()
    for row in trainer.state.log_history:
        if "loss" in row:
            print(f"step {row['step'] - 1} loss {row['loss']!r}", flush=True)
    print(f"norms {[row.get('grad_norm') for row in trainer.state.log_history]}", flush=True)
    # gloo's threads take the GIL to free the tensors of the last collective; a Python that is
    # finalizing by then kills them, and torch aborts.
    time.sleep(0.5)


if __name__ == "__main__":
    main()
