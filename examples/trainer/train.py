#!/usr/bin/env python3
"""Fine-tunes all weights of a causal language model with the Trainer of transformers."""

from __future__ import annotations

import argparse
from pathlib import Path

import datasets
import torch
import transformers

HERE = Path(__file__).parent


def main() -> None:
    """Train, or go on from the last checkpoint, and save the model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="toy/llama", help="a folder, or a name on the Hub")
    parser.add_argument("--data", default=str(HERE.parent / "data" / "text.jsonl"))
    parser.add_argument("--deepspeed_config", default=str(HERE / "ds_config.json"))
    parser.add_argument("--output", default="out/trainer")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--resume", action="store_true", help="from the last checkpoint in --output"
    )
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
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        learning_rate=1e-4,
        logging_steps=1,
        save_steps=2,
        save_total_limit=2,
        report_to=[],
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype="bfloat16")

    rows = datasets.load_dataset("json", data_files=args.data, split="train")
    rows = rows.map(
        lambda row: tokenizer(row["text"], truncation=True, max_length=512),
        remove_columns=rows.column_names,
    )
    trainer = transformers.Trainer(
        model=model,
        args=training,
        train_dataset=rows,
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=args.resume)
    trainer.save_state()
    trainer.save_model()  # in 16 bit, as from_pretrained and push_to_hub want it


if __name__ == "__main__":
    main()
