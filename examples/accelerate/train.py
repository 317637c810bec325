#!/usr/bin/env python3
"""Fine-tunes with a loop of one's own over accelerate."""

from __future__ import annotations

import argparse
from pathlib import Path

import accelerate
import datasets
import torch
import transformers

HERE = Path(__file__).parent


def parse() -> argparse.Namespace:
    """Return the arguments, with the names of `TrainingArguments`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="toy/llama", help="a folder, or a name on the Hub")
    parser.add_argument("--data", default=str(HERE.parent / "data" / "text.jsonl"))
    parser.add_argument("--max_length", type=int, default=512, help="tokens of a text")
    parser.add_argument("--deepspeed", default=str(HERE / "ds_config.json"), help="its JSON")
    parser.add_argument("--output_dir", default="out/accelerate")
    parser.add_argument("--max_steps", type=int, default=8)
    parser.add_argument("--per_device_train_batch_size", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--warmup_steps", type=int, default=0)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--save_steps", type=int, default=4)
    parser.add_argument("--resume_from_checkpoint", help="a folder checkpoint-N of --output_dir")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by some launchers")
    return parser.parse_args()


def main() -> None:
    """Train, or go on from a checkpoint, and save the model."""
    args = parse()
    # Made before the model, so that from_pretrained puts the weights where they belong at once.
    plugin = accelerate.DeepSpeedPlugin(hf_ds_config=args.deepspeed)
    # The order of the rows follows from seed and epoch, for runs that resume within one.
    order = accelerate.DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = accelerate.Accelerator(deepspeed_plugin=plugin, dataloader_config=order)
    transformers.set_seed(args.seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    if tokenizer.pad_token is None:  # Llama has none
        tokenizer.pad_token = tokenizer.eos_token
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype="bfloat16")
    model.gradient_checkpointing_enable()

    rows = datasets.load_dataset("json", data_files=args.data, split="train")
    rows = rows.map(
        lambda row: tokenizer(row["text"], truncation=True, max_length=args.max_length),
        remove_columns=rows.column_names,
    )
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    loader = torch.utils.data.DataLoader(
        rows, batch_size=args.per_device_train_batch_size, shuffle=True, collate_fn=collator
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    schedule = transformers.get_linear_schedule_with_warmup(
        optimizer, args.warmup_steps, args.max_steps
    )
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    step, batches = 0, loader
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        step = int(args.resume_from_checkpoint.rpartition("-")[2])
        batches = accelerator.skip_first_batches(loader, step % len(loader))
    while step < args.max_steps:
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            accelerator.print(f"step {step} loss {loss.item()!r}")
            step += 1
            if step % args.save_steps == 0:
                accelerator.save_state(f"{args.output_dir}/checkpoint-{step}")
            if step == args.max_steps:
                break
        batches = loader

    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        args.output_dir, is_main_process=accelerator.is_main_process, state_dict=state
    )
    if accelerator.is_main_process:
        tokenizer.save_pretrained(args.output_dir)
    accelerator.end_training()


if __name__ == "__main__":
    main()
