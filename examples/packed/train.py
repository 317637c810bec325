#!/usr/bin/env python3
"""Goes on with pre-training: documents one after another, cut into rows of equal length.

Takes every flag of TrainingArguments: `--per_device_train_batch_size 32 --learning_rate 1e-5`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import datasets
import torch
import transformers

HERE = Path(__file__).parent


@dataclasses.dataclass
class ScriptArguments:
    """The model and its data."""

    model: str = dataclasses.field(
        default="toy/llama", metadata={"help": "a folder, or a name on the Hub"}
    )
    data: str = dataclasses.field(
        default=str(HERE.parent / "data" / "text.jsonl"),
        metadata={"help": 'one {"text": ...} in a line'},
    )
    max_length: int = dataclasses.field(default=64, metadata={"help": "tokens of a row"})


def main() -> None:
    """Train on rows without padding, and save the model."""
    parser = transformers.HfArgumentParser((ScriptArguments, transformers.TrainingArguments))
    parser.set_defaults(  # for a toy
        output_dir="out/packed",
        deepspeed=str(HERE / "ds_config.json"),
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        max_steps=8,
        per_device_train_batch_size=8,
        gradient_checkpointing=True,
        learning_rate=1e-4,
        lr_scheduler_type="cosine",
        warmup_steps=1,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    # Made before the model, so that from_pretrained puts the weights where they belong at once.
    args, training = parser.parse_args_into_dataclasses()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype="bfloat16")

    def pack(documents: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = [
            token
            for document in tokenizer(documents["text"], add_special_tokens=False)["input_ids"]
            for token in (*document, tokenizer.eos_token_id)
        ]
        starts = range(0, len(ids) - args.max_length + 1, args.max_length)
        packed = [ids[start : start + args.max_length] for start in starts]
        return {"input_ids": packed, "labels": packed}

    rows = datasets.load_dataset("json", data_files=args.data, split="train")
    rows = rows.map(pack, batched=True, batch_size=1000, remove_columns=rows.column_names)
    if not rows:
        parser.error(f"argument --max_length: no row of {args.max_length} tokens in {args.data}")
    trainer = transformers.Trainer(
        model=model,
        args=training,
        train_dataset=rows,
        data_collator=transformers.default_data_collator,
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_state()
    trainer.save_model()


if __name__ == "__main__":
    main()
