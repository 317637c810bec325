#!/usr/bin/env python3
"""Fine-tunes an encoder-decoder with the Seq2SeqTrainer of transformers."""

from __future__ import annotations

import argparse
from pathlib import Path

import datasets
import torch
import transformers

HERE = Path(__file__).parent


def main() -> None:
    """Train from source texts to target texts, and save the model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="toy/t5", help="a folder, or a name on the Hub")
    parser.add_argument("--data", default=str(HERE.parent / "data" / "pairs.jsonl"))
    parser.add_argument("--deepspeed_config", default=str(HERE / "ds_config.json"))
    parser.add_argument("--output", default="out/encoder_decoder")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by some launchers")
    args = parser.parse_args()

    # Made before the model, so that from_pretrained puts the weights where they belong at once.
    training = transformers.Seq2SeqTrainingArguments(
        output_dir=args.output,
        deepspeed=args.deepspeed_config,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        max_steps=args.steps,
        per_device_train_batch_size=2,
        gradient_checkpointing=True,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(args.model, dtype="bfloat16")

    rows = datasets.load_dataset("json", data_files=args.data, split="train")
    rows = rows.map(
        lambda row: tokenizer(row["source"], text_target=row["target"], truncation=True),
        remove_columns=rows.column_names,
    )
    trainer = transformers.Seq2SeqTrainer(
        model=model,
        args=training,
        train_dataset=rows,
        data_collator=transformers.DataCollatorForSeq2Seq(tokenizer, model),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_state()
    trainer.save_model()


if __name__ == "__main__":
    main()
