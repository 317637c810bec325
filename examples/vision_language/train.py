#!/usr/bin/env python3
"""Fine-tunes a vision-language model on images with questions and answers."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers
from PIL import Image

HERE = Path(__file__).parent
COLOURS = {"red": (200, 30, 30), "green": (30, 160, 60), "blue": (40, 60, 200), "grey": (128,) * 3}


def rows() -> list[dict[str, object]]:
    """Return one-coloured images with what is said about each; yours come from a data set."""
    return [
        {
            "image": Image.new("RGB", (96, 64), colour),
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image"}, {"type": "text", "text": "What colour is it?"}],
                },
                {"role": "assistant", "content": [{"type": "text", "text": f"It is {name}."}]},
            ],
        }
        for name, colour in COLOURS.items()
    ] * 4


def main() -> None:
    """Train on images and text, and save the model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="toy/llava", help="a folder, or a name on the Hub")
    parser.add_argument("--deepspeed_config", default=str(HERE / "ds_config.json"))
    parser.add_argument("--output", default="out/vision_language")
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
        remove_unused_columns=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    processor = transformers.AutoProcessor.from_pretrained(args.model)
    model = transformers.AutoModelForImageTextToText.from_pretrained(args.model, dtype="bfloat16")

    def collate(batch: list[dict[str, object]]) -> dict[str, torch.Tensor]:
        texts = [processor.apply_chat_template(row["messages"]) for row in batch]
        images = [row["image"] for row in batch]
        inputs = processor(text=texts, images=images, padding=True, return_tensors="pt")
        labels = inputs["input_ids"].clone()
        labels[labels == processor.tokenizer.pad_token_id] = -100
        labels[labels == model.config.image_token_id] = -100
        return {**inputs, "labels": labels}

    trainer = transformers.Trainer(
        model=model,
        args=training,
        train_dataset=rows(),
        data_collator=collate,
        processing_class=processor,
    )
    trainer.train()
    trainer.save_state()
    trainer.save_model()


if __name__ == "__main__":
    main()
