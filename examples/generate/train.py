#!/usr/bin/env python3
"""Fine-tunes, and between steps evaluates and writes a sample."""

from __future__ import annotations

import argparse
from pathlib import Path

import datasets
import torch
import transformers
import trl.models.utils

HERE = Path(__file__).parent


class SamplingTrainer(transformers.Trainer):
    """Trainer that has the model write something after every evaluation."""

    def evaluate(self, *args: object, **kwargs: object) -> dict[str, float]:
        """Return the metrics of the evaluation set, after printing a sample."""
        metrics = super().evaluate(*args, **kwargs)
        prompt = self.processing_class("Bread rises because", return_tensors="pt")
        # Gathers the weights once for the sample, instead of once for every token of it.
        with trl.models.utils.unwrap_model_for_generation(
            self.model_wrapped, self.accelerator
        ) as model:
            inputs = prompt.to(self.args.device)
            ids = model.generate(**inputs, max_new_tokens=16, do_sample=False)
        print(f"sample {self.processing_class.decode(ids[0])!r}", flush=True)
        return metrics


def main() -> None:
    """Train, with an evaluation and a sample every other step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="toy/llama", help="a folder, or a name on the Hub")
    parser.add_argument("--data", default=str(HERE.parent / "data" / "text.jsonl"))
    parser.add_argument("--deepspeed_config", default=str(HERE / "ds_config.json"))
    parser.add_argument("--output", default="out/generate")
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
        eval_strategy="steps",
        eval_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype="bfloat16")
    rows = datasets.load_dataset("json", data_files=args.data, split="train")
    rows = rows.map(
        lambda row: tokenizer(row["text"], truncation=True, max_length=512),
        remove_columns=rows.column_names,
    )
    split = rows.train_test_split(test_size=0.25, seed=1)
    trainer = SamplingTrainer(
        model=model,
        args=training,
        train_dataset=split["train"],
        eval_dataset=split["test"],
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_state()
    trainer.save_model()


if __name__ == "__main__":
    main()
