#!/usr/bin/env python3
"""Trains LoRA adapters beside frozen weights in 4 bits (QLoRA), with transformers' Trainer."""

from __future__ import annotations

import argparse
from pathlib import Path

import bitsandbytes  # noqa: F401  transformers packs weights with it
import datasets
import peft
import torch
import transformers

HERE = Path(__file__).parent


def main() -> None:
    """Train the adapters, and save them alone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="toy/wide", help="a folder, or a name on the Hub")
    parser.add_argument("--data", default=str(HERE.parent / "data" / "text.jsonl"))
    parser.add_argument("--deepspeed_config", default=str(HERE / "ds_config.json"))
    parser.add_argument("--output", default="out/qlora")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--storage", default="uint8", help="dtype that packed weights are in")
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
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    transformers.set_seed(training.seed)  # the adapters begin at random
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    packing = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        # Two weights in each element of bitsandbytes' default, uint8; four in one of bfloat16.
        bnb_4bit_quant_storage=args.storage,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype="bfloat16", quantization_config=packing
    )
    adapters = peft.LoraConfig(
        task_type="CAUSAL_LM", r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear"
    )
    # ZeRO-3 wants all parameters in one dtype, and adapters are in fp32 otherwise.
    model = peft.get_peft_model(model, adapters, autocast_adapter_dtype=False)
    model.enable_input_require_grads()  # else checkpointed layers of frozen weights learn nothing
    model.print_trainable_parameters()

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
    trainer.save_model()  # the adapters; peft.AutoPeftModel reads them


if __name__ == "__main__":
    main()
