#!/usr/bin/env python3
"""Fine-tunes on conversations with the SFTTrainer of TRL.

Takes every flag of SFTConfig: `--per_device_train_batch_size 8 --learning_rate 1e-6`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import datasets
import torch
import transformers
import trl

HERE = Path(__file__).parent


@dataclasses.dataclass
class ScriptArguments:
    """The model and its data."""

    model: str = dataclasses.field(
        default="toy/llama", metadata={"help": "a folder, or a name on the Hub"}
    )
    data: str = dataclasses.field(
        default=str(HERE.parent / "data" / "chat.jsonl"),
        metadata={"help": 'one {"messages": [...]} in a line'},
    )


def main() -> None:
    """Train on conversations, and save the model."""
    parser = transformers.HfArgumentParser((ScriptArguments, trl.SFTConfig))
    parser.set_defaults(  # for a toy
        output_dir="out/sft",
        deepspeed=str(HERE / "ds_config.json"),
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        max_steps=8,
        per_device_train_batch_size=2,
        gradient_checkpointing=True,
        learning_rate=1e-4,
        max_length=512,
        model_init_kwargs={"dtype": "bfloat16"},
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    args, training = parser.parse_args_into_dataclasses()
    trainer = trl.SFTTrainer(
        model=args.model,  # loaded by the trainer, after the configuration above
        args=training,
        train_dataset=datasets.load_dataset("json", data_files=args.data, split="train"),
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_state()
    trainer.save_model()


if __name__ == "__main__":
    main()
