#!/usr/bin/env python3
"""Fine-tunes all weights of a mixture of experts with the Trainer of transformers.

Takes every flag of TrainingArguments: `--per_device_train_batch_size 4 --learning_rate 1e-5`.
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
        default="toy/mixtral", metadata={"help": "a folder, or a name on the Hub"}
    )
    data: str = dataclasses.field(
        default=str(HERE.parent / "data" / "text.jsonl"),
        metadata={"help": 'one {"text": ...} in a line'},
    )
    max_length: int = dataclasses.field(default=512, metadata={"help": "tokens of a text"})


def main() -> None:
    """Train with the loss that balances the experts, and save the model."""
    parser = transformers.HfArgumentParser((ScriptArguments, transformers.TrainingArguments))
    parser.set_defaults(  # for a toy
        output_dir="out/moe",
        deepspeed=str(HERE / "ds_config.json"),
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        max_steps=8,
        per_device_train_batch_size=2,
        gradient_checkpointing=True,
        learning_rate=1e-4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    # Made before the model, so that from_pretrained puts the weights where they belong at once.
    args, training = parser.parse_args_into_dataclasses()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    if tokenizer.pad_token is None:  # Mixtral has none
        tokenizer.pad_token = tokenizer.eos_token
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype="bfloat16", output_router_logits=True
    )
    rows = datasets.load_dataset("json", data_files=args.data, split="train")
    rows = rows.map(
        lambda row: tokenizer(row["text"], truncation=True, max_length=args.max_length),
        remove_columns=rows.column_names,
    )
    trainer = transformers.Trainer(
        model=model,
        args=training,
        train_dataset=rows,
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_state()
    trainer.save_model()


if __name__ == "__main__":
    main()
