#!/usr/bin/env python3
"""Goes on with pre-training: documents one after another, cut into rows of equal length."""

from __future__ import annotations

import argparse
from pathlib import Path

import datasets
import torch
import transformers

HERE = Path(__file__).parent


def main() -> None:
    """Train on rows without padding, and save the model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="toy/llama", help="a folder, or a name on the Hub")
    parser.add_argument("--data", default=str(HERE.parent / "data" / "text.jsonl"))
    parser.add_argument("--deepspeed_config", default=str(HERE / "ds_config.json"))
    parser.add_argument("--output", default="out/packed")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by some launchers")
    args = parser.parse_args()

    # Made before the model, so that from_pretrained puts the weights where they belong at once.
    training = transformers.TrainingArguments(
        output_dir=args.output,
        deepspeed=args.deepspeed_config,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        max_steps=args.steps,
        per_device_train_batch_size=2,
        gradient_checkpointing=True,
        learning_rate=1e-4,
        lr_scheduler_type="cosine",
        warmup_steps=1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype="bfloat16")

    def pack(documents: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = [
            token
            for document in tokenizer(documents["text"], add_special_tokens=False)["input_ids"]
            for token in (*document, tokenizer.eos_token_id)
        ]
        starts = range(0, len(ids) - args.length + 1, args.length)
        return {"input_ids": [ids[start : start + args.length] for start in starts]}

    rows = datasets.load_dataset("json", data_files=args.data, split="train")
    rows = rows.map(pack, batched=True, batch_size=1000, remove_columns=rows.column_names)
    trainer = transformers.Trainer(
        model=model,
        args=training,
        train_dataset=rows,
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_state()
    trainer.save_model()


if __name__ == "__main__":
    main()
