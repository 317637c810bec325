#!/usr/bin/env python3
"""Trains on preferences with the DPOTrainer of TRL, beside a frozen reference model."""

from __future__ import annotations

import argparse
from pathlib import Path

import datasets
import torch
import trl

HERE = Path(__file__).parent


def main() -> None:
    """Train on pairs of a chosen and a rejected answer, and save the model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="toy/llama", help="a folder, or a name on the Hub")
    parser.add_argument("--data", default=str(HERE.parent / "data" / "preferences.jsonl"))
    parser.add_argument("--deepspeed_config", default=str(HERE / "ds_config.json"))
    parser.add_argument("--output", default="out/dpo")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by some launchers")
    args = parser.parse_args()

    training = trl.DPOConfig(
        output_dir=args.output,
        deepspeed=args.deepspeed_config,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        max_steps=args.steps,
        per_device_train_batch_size=2,
        gradient_checkpointing=True,
        learning_rate=1e-5,
        beta=0.1,
        max_length=512,
        model_init_kwargs={"dtype": "bfloat16"},
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    trainer = trl.DPOTrainer(
        model=args.model,  # loaded twice: the second is the reference, a ZeRO-3 model for inference
        args=training,
        train_dataset=datasets.load_dataset("json", data_files=args.data, split="train"),
    )
    trainer.train()
    trainer.save_state()
    trainer.save_model()


if __name__ == "__main__":
    main()
