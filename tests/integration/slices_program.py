"""Trainers that take a step by accumulation, or the same step in one pass over a larger batch.

Usage: slices_program.py DEEPSPEED_JSON OUTPUT_FOLDER ROWS ACCUMULATION [WAY ...]

ROWS is the size of a batch on a rank's device. For each way the master weights are saved as
OUTPUT_FOLDER/WAY.pt; the last line of output, JSON, has the log of each way. Lines that begin with
"WAY " tell whose output follows.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import datasets
import peft
import torch
import transformers
import trl
from deepspeed.utils import safe_get_full_fp32_param

from tests.integration.slices_models import (
    COLUMNS,
    ROWS,
    Classes,
    Rows,
    adapted,
    adapters,
    classifier,
    language_model,
    mixture,
    to_longest,
)
from tests.support.process_group import leave, say

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = 3
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TIMED = ("runtime", "per_second", "flos", "memascend_")

Found = dict[str, Any]


class Ways:
    """One method for each way; each trains a new model."""

    def __init__(self, config: Path, folder: Path, rows: int, accumulation: int) -> None:
        self._config, self._folder = config, folder
        self._rows, self._accumulation = rows, accumulation
        self.toy, self.experts = folder / "toy", folder / "experts"
        transformers.set_seed(1)
        write = runpy.run_path(str(EXAMPLES / "toy.py"))
        write["llama"](self.toy)
        write["mixtral"](self.experts)

    def nonreentrant(self) -> Found:
        """Train on padded rows."""
        return self._train("nonreentrant")

    def reentrant(self) -> Found:
        """Likewise, with the checkpoints of old."""
        return self._train("reentrant", gradient_checkpointing_kwargs={"use_reentrant": True})

    def tied(self) -> Found:
        """Train a model whose head is its embedding."""
        return self._train("tied", model=lambda: language_model(tie_word_embeddings=True))

    def dropout(self) -> Found:
        """Train with random numbers in each layer."""
        return self._train("dropout", model=lambda: language_model(attention_dropout=0.1))

    def padded_to_longest(self) -> Found:
        """Train on batches that are padded to the longest of their rows."""
        return self._train("padded_to_longest", data_collator=to_longest)

    def short_last_batch(self) -> Found:
        """Train two epochs whose last batch is short."""
        return self._train(
            "short_last_batch",
            train_dataset=Rows(20 * WORLD),
            max_steps=-1,
            num_train_epochs=2,
            learning_rate=1e-4,
        )

    def evaluation(self) -> Found:
        """Evaluate between steps."""
        return self._train(
            "evaluation",
            eval_dataset=Rows(10, seed=8),
            eval_strategy="steps",
            eval_steps=1,
            per_device_eval_batch_size=4,
        )

    def generation(self) -> Found:
        """Sample from the model behind each step, in a callback."""
        return self._train("generation", callbacks=[Sampling()])

    def forward_alone(self) -> Found:
        """Run a forward pass with a graph before each step, and drop it."""
        return self._train("forward_alone", trainer_class=WithForwardAlone)

    def resumed(self) -> Found:
        """Save in the middle of an epoch, and continue from there."""
        settings = {"save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}
        self._trainer("resumed", max_steps=2, **settings).train()
        trainer = self._trainer("resumed", max_steps=4, **settings)
        trainer.train(resume_from_checkpoint=str(self._folder / "resumed" / "checkpoint-2"))
        return self._found("resumed", trainer)

    def uninterrupted(self) -> Found:
        """Train as long without a break."""
        return self._train("uninterrupted", max_steps=4, lr_scheduler_type="constant")

    def label_smoothing(self) -> Found:
        """Compute a loss outside of the model."""
        return self._train("label_smoothing", label_smoothing_factor=0.1)

    def sequence_classification(self) -> Found:
        """Train a head of two classes over a decoder."""
        return self._train("sequence_classification", model=classifier, train_dataset=Classes())

    def classification_of_mean_loss(self) -> Found:
        """Likewise, with a model that tells the Trainer to divide its loss by micro-steps."""
        return self._train(
            "classification_of_mean_loss",
            model=lambda: classifier(accepts_loss_kwargs=False),
            train_dataset=Classes(),
        )

    def liger(self) -> Found:
        """Train with Liger's loss; its other kernels do not run in Triton's interpreter."""
        kernels = dict.fromkeys(("rope", "swiglu", "rms_norm", "cross_entropy"), False)
        return self._train(
            "liger",
            use_liger_kernel=True,
            liger_kernel_config=kernels | {"fused_linear_cross_entropy": True},
        )

    def router_loss(self) -> Found:
        """Train a mixture of experts with the loss of its router logits."""
        return self._train("router_loss", model=mixture)

    def lora(self) -> Found:
        """Train adapters alone."""
        return self._train("lora", model=adapted)

    def lora_reentrant(self) -> Found:
        """Likewise, with the checkpoints of old, for which embeddings want a gradient."""
        return self._train(
            "lora_reentrant",
            model=adapted,
            gradient_checkpointing_kwargs={"use_reentrant": True},
        )

    def accuracy_in_training(self) -> Found:
        """Read logits beside the loss, as trainers that log the accuracy of tokens do."""
        return self._train("accuracy_in_training", trainer_class=WithAccuracy)

    def loss_of_logits(self) -> Found:
        """Add to the model's loss another one of its logits."""
        return self._train("loss_of_logits", trainer_class=WithLogitLoss)

    def accelerate_loop(self) -> Found:
        """Train in a loop of one's own, on rows of one length."""
        return self._loop("accelerate_loop", Rows(padded=False))

    def accelerate_loop_of_padded_rows(self) -> Found:
        """Likewise on padded rows, where the mean of means is another loss."""
        return self._loop("accelerate_loop_of_padded_rows", Rows())

    def accelerate_loop_with_generation(self) -> Found:
        """Train in such a loop that samples before each forward pass, in training mode."""
        return self._loop("accelerate_loop_with_generation", Rows(padded=False), samples=True)

    def sft(self) -> Found:
        """Train with TRL on conversations."""
        return self._sft("sft")

    def sft_experts(self) -> Found:
        """Train a mixture of experts with TRL, which adds the loss of router logits."""
        return self._sft("sft_experts", model=self.experts)

    def sft_packed(self) -> Found:
        """Train with TRL on conversations that are packed into one row."""
        return self._sft("sft_packed", packing=True)

    def sft_wrapped(self) -> Found:
        """Train with TRL on conversations in rows of one length."""
        return self._sft("sft_wrapped", packing=True, packing_strategy="wrapped", max_length=32)

    def dpo(self) -> Found:
        """Train with TRL on preferences."""
        return self._dpo("dpo")

    def dpo_squares(self) -> Found:
        """Likewise, with squares of margins as a loss (IPO)."""
        return self._dpo("dpo_squares", loss_type="ipo")

    def dpo_of_two_losses(self) -> Found:
        """Likewise, with two losses, one of which is that of language modelling."""
        return self._dpo("dpo_of_two_losses", loss_type=["sigmoid", "sft"], loss_weights=[0.8, 1.0])

    def dpo_precomputed(self) -> Found:
        """Likewise, with a reference that is computed before the first step.

        In several batches: DeepSpeed does not train a model that had one in another engine.
        """
        return self._dpo(
            "dpo_precomputed", precompute_ref_log_probs=True, precompute_ref_batch_size=2
        )

    def dpo_adapters(self) -> Found:
        """Train adapters alone, whose absence is the reference."""
        return self._dpo("dpo_adapters", peft_config=adapters())

    # ------------------------------------------------------------------------------------------

    def _dpo(self, name: str, **changes: Any) -> Found:
        rows = datasets.load_dataset(
            "json", data_files=str(EXAMPLES / "data" / "preferences.jsonl"), split="train"
        )
        return self._train_trl(name, trl.DPOTrainer, trl.DPOConfig, rows, **changes)

    def _settings(self, name: str) -> dict[str, Any]:
        return {
            "output_dir": str(self._folder / name),
            "deepspeed": str(self._config),
            "bf16": True,
            "use_cpu": True,
            "logging_steps": 1,
            "report_to": [],
            "disable_tqdm": True,
            "seed": 11,
            "max_steps": STEPS,
            "per_device_train_batch_size": self._rows,
            "gradient_accumulation_steps": self._accumulation,
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
            "learning_rate": 1e-3,
            "max_grad_norm": 1.0,
            "save_strategy": "no",
        }

    def _train(self, name: str, **changes: Any) -> Found:
        trainer = self._trainer(name, **changes)
        trainer.train()
        return self._found(name, trainer)

    def _trainer(
        self,
        name: str,
        *,
        model: Callable[[], Any] | None = None,
        trainer_class: Any = transformers.Trainer,
        **changes: Any,
    ) -> transformers.Trainer:
        # That of the way before, which a Trainer would continue with.
        accelerate.state.AcceleratorState._reset_state()
        names = ("callbacks", "data_collator", "eval_dataset", "train_dataset")
        given = {key: changes.pop(key) for key in names if key in changes}
        # Before the model, so that transformers builds it under zero.Init.
        arguments = transformers.TrainingArguments(**self._settings(name) | changes)
        given.setdefault("train_dataset", Rows(ROWS * WORLD))
        return trainer_class(model=(model or language_model)(), args=arguments, **given)

    def _sft(self, name: str, **changes: Any) -> Found:
        rows = datasets.load_dataset(
            "json", data_files=str(EXAMPLES / "data" / "chat.jsonl"), split="train"
        )
        # Longer than each conversation: transformers leaves out a mask that masks nothing, and the
        # bits of attention without a mask are others.
        length = {"max_length": 128, "pad_to_multiple_of": 128}
        return self._train_trl(name, trl.SFTTrainer, trl.SFTConfig, rows, **length | changes)

    def _train_trl(
        self,
        name: str,
        trainer_class: Any,
        config_class: Any,
        rows: Any,
        *,
        model: Path | None = None,
        peft_config: peft.LoraConfig | None = None,
        **changes: Any,
    ) -> Found:
        accelerate.state.AcceleratorState._reset_state()
        arguments = config_class(
            **self._settings(name)
            | {
                "max_length": 64,
                "pad_to_multiple_of": 64,  # so that each batch is as long as another
                "model_init_kwargs": {"dtype": "bfloat16"},
                "learning_rate": 1e-4,
            }
            | changes
        )
        trainer = trainer_class(
            model=str(model or self.toy),
            args=arguments,
            train_dataset=rows,
            peft_config=peft_config,
        )
        trainer.train()
        return self._found(name, trainer)

    def _loop(self, name: str, rows: Rows, *, samples: bool = False) -> Found:
        accelerate.state.AcceleratorState._reset_state()
        config = json.loads(self._config.read_text())
        del config["optimizer"]
        config |= {
            "train_micro_batch_size_per_gpu": self._rows,
            "gradient_accumulation_steps": self._accumulation,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
        }
        zero_keys = config["zero_optimization"]
        for key in [key for key, value in zero_keys.items() if value == "auto"]:
            del zero_keys[key]
        plugin = accelerate.DeepSpeedPlugin(hf_ds_config=config)
        accelerator = accelerate.Accelerator(deepspeed_plugin=plugin)
        bare = language_model()
        bare.gradient_checkpointing_enable({"use_reentrant": False})
        bare.train()
        optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-3)
        loader = torch.utils.data.DataLoader(rows, batch_size=self._rows)
        model, optimizer, loader = accelerator.prepare(bare, optimizer, loader)
        losses: list[float] = []
        for batch in loader:
            if samples:
                sample(accelerator.unwrap_model(model))
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        count = self._accumulation
        means = [sum(losses[at : at + count]) / count for at in range(0, len(losses), count)]
        self._save(name, bare)
        return {"log": [{"loss": loss} for loss in means]}

    def _found(self, name: str, trainer: Any) -> Found:
        self._save(name, trainer.model)
        log = [
            {key: value for key, value in row.items() if not any(word in key for word in TIMED)}
            for row in trainer.state.log_history
        ]
        return {"log": log}

    def _save(self, name: str, model: Any) -> None:
        weights = {
            key: safe_get_full_fp32_param(param).clone()
            for key, param in model.named_parameters()
            if param.requires_grad
        }
        if RANK == 0:
            torch.save(weights, self._folder / f"{name}.pt")


class WithAccuracy(transformers.Trainer):
    """Logs the share of tokens that are predicted."""

    def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
        wants = keywords.pop("return_outputs", False)
        loss, outputs = super().compute_loss(*arguments, return_outputs=True, **keywords)
        assert outputs.logits.argmax(-1).dim() == 2
        return (loss, outputs) if wants else loss


class WithForwardAlone(transformers.Trainer):
    """Looks at the loss of another batch before each step."""

    def training_step(self, model: Any, *arguments: Any, **keywords: Any) -> Any:
        other = torch.utils.data.default_collate([Rows(seed=9)[number] for number in range(4)])
        assert model(**other).loss.requires_grad
        return super().training_step(model, *arguments, **keywords)


class Sampling(transformers.TrainerCallback):
    """Logs tokens of the model, as callbacks of trainers do."""

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        model.eval()
        sample(model)
        model.train()


def sample(model: Any) -> None:
    """Let a model continue two rows."""
    prompt = Rows(2, seed=9, padded=False)
    ids = torch.stack([prompt[number]["input_ids"] for number in range(2)])
    said = model.generate(input_ids=ids, do_sample=True, max_new_tokens=3, min_new_tokens=3)
    assert said.shape == (2, COLUMNS + 3)


class WithLogitLoss(transformers.Trainer):
    """Keeps logits small."""

    def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
        keywords.pop("return_outputs", False)
        loss, outputs = super().compute_loss(*arguments, return_outputs=True, **keywords)
        return (
            loss
            + 1e-3 * outputs.logits.float().square().mean() / self.args.gradient_accumulation_steps
        )


def main() -> None:
    config, folder, rows, accumulation, *names = sys.argv[1:]
    ways = Ways(Path(config), Path(folder), int(rows), int(accumulation))
    results = {}
    for name in names:
        if RANK == 0:
            say(f"WAY {name}")
        results[name] = getattr(ways, name)()
        gc.collect()
    if RANK == 0:
        say("RESULT " + json.dumps(results))
    leave()


if __name__ == "__main__":
    main()
