#!/usr/bin/env python3
"""Fine-tunes all weights of a mixture of experts with the Trainer of transformers."""

from __future__ import annotations

import argparse
from pathlib import Path

import datasets
import torch
import transformers

HERE = Path(__file__).parent


def main() -> None:
    """Train with the loss that balances the experts, and save the model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="toy/mixtral", help="a folder, or a name on the Hub")
    parser.add_argument("--data", default=str(HERE.parent / "data" / "text.jsonl"))
    parser.add_argument("--deepspeed_config", default=str(HERE / "ds_config.json"))
    parser.add_argument("--output", default="out/moe")
    parser.add_argument("--steps", type=int, default=8)
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
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype="bfloat16", output_router_logits=True
    )
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
    trainer.train()
    trainer.save_state()
    trainer.save_model()


if __name__ == "__main__":
    main()
