#!/usr/bin/env python3
"""Fine-tunes an encoder-decoder with the Seq2SeqTrainer of transformers.

Takes every flag of Seq2SeqTrainingArguments: `--per_device_train_batch_size 8`.
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
        default="toy/t5", metadata={"help": "a folder, or a name on the Hub"}
    )
    data: str = dataclasses.field(
        default=str(HERE.parent / "data" / "pairs.jsonl"),
        metadata={"help": 'one {"source", "target"} in a line'},
    )
    max_length: int = dataclasses.field(
        default=512, metadata={"help": "tokens of a source, and of a target"}
    )


def main() -> None:
    """Train from source texts to target texts, and save the model."""
    parser = transformers.HfArgumentParser((ScriptArguments, transformers.Seq2SeqTrainingArguments))
    parser.set_defaults(  # for a toy
        output_dir="out/encoder_decoder",
        deepspeed=str(HERE / "ds_config.json"),
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        max_steps=8,
        per_device_train_batch_size=2,
        gradient_checkpointing=True,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    # Made before the model, so that from_pretrained puts the weights where they belong at once.
    args, training = parser.parse_args_into_dataclasses()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(args.model, dtype="bfloat16")

    rows = datasets.load_dataset("json", data_files=args.data, split="train")
    rows = rows.map(
        lambda row: tokenizer(
            row["source"], text_target=row["target"], truncation=True, max_length=args.max_length
        ),
        remove_columns=rows.column_names,
    )
    trainer = transformers.Seq2SeqTrainer(
        model=model,
        args=training,
        train_dataset=rows,
        data_collator=transformers.DataCollatorForSeq2Seq(tokenizer, model),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_state()
    trainer.save_model()


if __name__ == "__main__":
    main()
