#!/usr/bin/env python3
"""Trains with OpenRLHF's Actor and DeepspeedStrategy, and a recipe's JSON for what it offloads.

OpenRLHF writes its DeepSpeed configuration in code, where "cpu" is the only device of an offload
section. A strategy of one's own adds the two sections and the block: `WithRecipe` below.

Its trainers and commands need a GPU, and flash-attn. So the loop is this file's, and two things
have a stand-in: the functions of flash-attn that its modules import (only packed samples use them)
and the wait for the GPU after saving. `scripts/try_frameworks.py` runs this on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import deepspeed
import safetensors.torch
import torch
import transformers

FLASH_ATTN = {
    "flash_attn": (),
    "flash_attn.bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
    "flash_attn.utils": (),
    "flash_attn.utils.distributed": ("all_gather",),
}


def missing(*_arguments: Any, **_keywords: Any) -> None:
    """Stand in for a function of flash-attn."""
    raise NotImplementedError("flash-attn is not installed")


for module, names in FLASH_ATTN.items():
    sys.modules[module] = ModuleType(module)
    vars(sys.modules[module]).update(dict.fromkeys(names, missing))

from openrlhf.models import Actor, SFTLoss  # noqa: E402
from openrlhf.utils.deepspeed import DeepspeedStrategy  # noqa: E402
from openrlhf.utils.deepspeed import deepspeed as strategies  # noqa: E402


class WithRecipe(DeepspeedStrategy):
    """OpenRLHF's strategy with the offload sections and the block of a recipe's JSON."""

    def __init__(self, recipe: dict[str, Any], **keywords: Any) -> None:
        super().__init__(**keywords)
        self._recipe = recipe

    def get_ds_train_config(self, *arguments: Any, **keywords: Any) -> dict[str, Any]:
        """Return the JSON of a model that is trained."""
        config = super().get_ds_train_config(*arguments, **keywords)
        sections = self._recipe["zero_optimization"]
        for name in ("offload_param", "offload_optimizer"):
            config["zero_optimization"][name] = sections[name]
        return config | {key: self._recipe[key] for key in ("memascend",) if key in self._recipe}


def main() -> None:
    """Train, save a checkpoint midway, and the model at the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--lora", action="store_true")
    args = parser.parse_args()

    strategies.torch_dist_barrier_and_cuda_sync = torch.distributed.barrier
    transformers.set_seed(42)
    deepspeed.init_distributed()
    settings = {"param_dtype": "bf16", "zero_stage": 3, "adam_offload": True}
    strategy = WithRecipe(
        json.loads(Path(args.deepspeed_config).read_text(encoding="utf-8")),
        zero_stage=3,
        micro_train_batch_size=1,
        train_batch_size=2,
        args=SimpleNamespace(
            ds=SimpleNamespace(**settings, tensor_parallel_size=1),
            train=SimpleNamespace(),
        ),
    )
    actor = Actor(
        args.model,
        attn_implementation="sdpa",
        ds_config=strategy.get_ds_train_config(),
        lora_rank=8 if args.lora else 0,
        target_modules="all-linear",
    )
    actor.gradient_checkpointing_enable()
    adam = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    plan = {"optim": "adam", "adam": adam, "max_norm": 1.0, "scheduler_steps": args.steps}
    actor, _, scheduler = strategy.prepare((actor, plan))
    train(strategy, actor, scheduler, args)


def train(strategy: WithRecipe, actor: Any, scheduler: Any, args: argparse.Namespace) -> None:
    """Make the steps that are left."""
    engine = actor.model
    checkpoints = os.path.join(args.output, "checkpoints")
    if args.resume:
        found, _ = strategy.load_ckpt(engine, checkpoints, tag=f"step{args.steps // 2}")
        assert found is not None
    words = transformers.AutoTokenizer.from_pretrained(args.model)
    rows = [json.loads(line) for line in Path(args.data).read_text(encoding="utf-8").splitlines()]
    lose = SFTLoss()
    count = engine.global_steps * engine.gradient_accumulation_steps()
    actor.train()
    while engine.global_steps < args.steps:
        row = rows[count % len(rows)]
        count += 1
        text = words.apply_chat_template(row["messages"], tokenize=False)
        batch = words(text, return_tensors="pt", add_special_tokens=False)
        tokens, mask = batch["input_ids"], batch["attention_mask"]
        logarithms, _ = actor(tokens, attention_mask=mask, return_output=True, return_logprobs=True)
        strategy.backward(lose(logarithms, mask[:, 1:].float()), actor, None)
        is_step = engine.is_gradient_accumulation_boundary()
        strategy.optimizer_step(None, actor, scheduler)
        if is_step and engine.global_steps == args.steps // 2 and not args.resume:
            strategy.save_ckpt(engine, checkpoints, tag=f"step{engine.global_steps}")
    folder = Path(args.output, "model")
    strategy.save_model(actor, words, str(folder))
    if args.lora:  # saved by torch, with pickle
        adapters = torch.load(folder / "adapter_model.bin", weights_only=True)
        safetensors.torch.save_file(adapters, folder / "adapter_model.safetensors")


if __name__ == "__main__":
    main()
