#!/usr/bin/env python3
"""Fine-tunes a vision-language model on images with questions and answers.

Takes every flag of TrainingArguments: `--per_device_train_batch_size 4 --learning_rate 1e-5`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
import transformers
from PIL import Image
from transformers.image_utils import load_image

HERE = Path(__file__).parent
COLOURS = {"red": (200, 30, 30), "green": (30, 160, 60), "blue": (40, 60, 200), "grey": (128,) * 3}


@dataclasses.dataclass
class ScriptArguments:
    """The model and its data."""

    model: str = dataclasses.field(
        default="toy/llava", metadata={"help": "a folder, or a name on the Hub"}
    )
    data: str | None = dataclasses.field(
        default=None, metadata={"help": 'one {"image": PATH, "messages": [...]} in a line'}
    )


def toy_rows() -> list[dict[str, object]]:
    """Return one-coloured images with questions and answers."""
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
    parser = transformers.HfArgumentParser((ScriptArguments, transformers.TrainingArguments))
    parser.set_defaults(  # for a toy
        output_dir="out/vision_language",
        deepspeed=str(HERE / "ds_config.json"),
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        max_steps=8,
        per_device_train_batch_size=2,
        gradient_checkpointing=True,
        learning_rate=1e-4,
        remove_unused_columns=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    # Made before the model, so that from_pretrained puts the weights where they belong at once.
    args, training = parser.parse_args_into_dataclasses()
    processor = transformers.AutoProcessor.from_pretrained(args.model)
    model = transformers.AutoModelForImageTextToText.from_pretrained(args.model, dtype="bfloat16")

    rows = toy_rows()
    if args.data is not None:
        rows = [json.loads(line) for line in Path(args.data).read_text("utf-8").splitlines()]

    def collate(batch: list[dict[str, object]]) -> dict[str, torch.Tensor]:
        texts = [processor.apply_chat_template(row["messages"]) for row in batch]
        images = [load_image(row["image"]) for row in batch]
        inputs = processor(text=texts, images=images, padding=True, return_tensors="pt")
        labels = inputs["input_ids"].clone()
        labels[labels == processor.tokenizer.pad_token_id] = -100
        labels[labels == model.config.image_token_id] = -100
        return {**inputs, "labels": labels}

    trainer = transformers.Trainer(
        model=model,
        args=training,
        train_dataset=rows,
        data_collator=collate,
        processing_class=processor,
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_state()
    trainer.save_model()


if __name__ == "__main__":
    main()
