#!/usr/bin/env python3
"""Fine-tunes, and between steps evaluates and writes a sample.

Takes every flag of TrainingArguments: `--per_device_train_batch_size 8 --eval_steps 100`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import datasets
import torch
import transformers
import trl.models.utils

HERE = Path(__file__).parent


@dataclasses.dataclass
class ScriptArguments:
    """The model, its data, and the sample."""

    model: str = dataclasses.field(
        default="toy/llama", metadata={"help": "a folder, or a name on the Hub"}
    )
    data: str = dataclasses.field(
        default=str(HERE.parent / "data" / "text.jsonl"),
        metadata={"help": 'one {"text": ...} in a line'},
    )
    max_length: int = dataclasses.field(default=512, metadata={"help": "tokens of a text"})
    prompt: str = dataclasses.field(
        default="Bread rises because", metadata={"help": "the sample begins with it"}
    )
    new_tokens: int = dataclasses.field(default=16, metadata={"help": "tokens of the sample"})


class SamplingTrainer(transformers.Trainer):
    """Trainer that has the model write something after every evaluation."""

    prompt: str
    new_tokens: int

    def evaluate(self, *args: object, **kwargs: object) -> dict[str, float]:
        """Return the metrics of the evaluation set, after printing a sample."""
        metrics = super().evaluate(*args, **kwargs)
        prompt = self.processing_class(self.prompt, return_tensors="pt")
        # Gathers the weights once for the sample, instead of once for every token of it.
        with trl.models.utils.unwrap_model_for_generation(
            self.model_wrapped, self.accelerator
        ) as model:
            inputs = prompt.to(self.args.device)
            ids = model.generate(**inputs, max_new_tokens=self.new_tokens, do_sample=False)
        print(f"sample {self.processing_class.decode(ids[0])!r}", flush=True)
        return metrics


def main() -> None:
    """Train, with an evaluation and a sample every other step."""
    parser = transformers.HfArgumentParser((ScriptArguments, transformers.TrainingArguments))
    parser.set_defaults(  # for a toy
        output_dir="out/generate",
        deepspeed=str(HERE / "ds_config.json"),
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        max_steps=8,
        per_device_train_batch_size=2,
        gradient_checkpointing=True,
        learning_rate=1e-4,
        eval_strategy="steps",
        eval_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    # Made before the model, so that from_pretrained puts the weights where they belong at once.
    args, training = parser.parse_args_into_dataclasses()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    if tokenizer.pad_token is None:  # Llama has none
        tokenizer.pad_token = tokenizer.eos_token
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype="bfloat16")
    rows = datasets.load_dataset("json", data_files=args.data, split="train")
    rows = rows.map(
        lambda row: tokenizer(row["text"], truncation=True, max_length=args.max_length),
        remove_columns=rows.column_names,
    )
    split = rows.train_test_split(test_size=0.25, seed=training.seed)
    trainer = SamplingTrainer(
        model=model,
        args=training,
        train_dataset=split["train"],
        eval_dataset=split["test"],
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )
    trainer.prompt, trainer.new_tokens = args.prompt, args.new_tokens
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_state()
    trainer.save_model()


if __name__ == "__main__":
    main()
