#!/usr/bin/env python3
"""Trains LoRA adapters beside frozen weights in 4 bits (QLoRA), with transformers' Trainer.

Takes every flag of TrainingArguments: `--per_device_train_batch_size 8 --learning_rate 2e-4`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import bitsandbytes  # noqa: F401  transformers packs weights with it
import datasets
import peft
import torch
import transformers

HERE = Path(__file__).parent


@dataclasses.dataclass
class ScriptArguments:
    """The model, its data, and the adapters."""

    model: str = dataclasses.field(
        default="toy/wide", metadata={"help": "a folder, or a name on the Hub"}
    )
    data: str = dataclasses.field(
        default=str(HERE.parent / "data" / "text.jsonl"),
        metadata={"help": 'one {"text": ...} in a line'},
    )
    max_length: int = dataclasses.field(default=512, metadata={"help": "tokens of a text"})
    lora_r: int = dataclasses.field(default=16, metadata={"help": "rank of the adapters"})
    lora_alpha: int = 32
    storage: Literal["uint8", "bfloat16"] = dataclasses.field(
        default="uint8", metadata={"help": "dtype that packed weights are in"}
    )


def main() -> None:
    """Train the adapters, and save them alone."""
    parser = transformers.HfArgumentParser((ScriptArguments, transformers.TrainingArguments))
    parser.set_defaults(  # for a toy
        output_dir="out/qlora",
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
    transformers.set_seed(training.seed)  # the adapters begin at random
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    if tokenizer.pad_token is None:  # Llama has none
        tokenizer.pad_token = tokenizer.eos_token
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
        task_type="CAUSAL_LM",
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=0.0,
        target_modules="all-linear",
    )
    # ZeRO-3 wants all parameters in one dtype, and adapters are in fp32 otherwise.
    model = peft.get_peft_model(model, adapters, autocast_adapter_dtype=False)
    model.enable_input_require_grads()  # else checkpointed layers of frozen weights learn nothing
    model.print_trainable_parameters()

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
    trainer.save_model()  # the adapters; peft.AutoPeftModel reads them


if __name__ == "__main__":
    main()
