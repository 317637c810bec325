"""Trains stacks of layers and prints what a step of each moved beside what the plan says, as JSON.

Started by test_traffic.py, with the options of every training.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from typing import Any

import deepspeed
import torch
from torch.utils.checkpoint import checkpoint

import memascend  # noqa: F401  what the torch.backends entry point does in an installed copy
from tests.support.process_group import leave

LAYERS, WIDTH = 24, 1024
#: The first step makes the states, and DeepSpeed learns the order of the modules.
WARMUPS, STEPS = 2, 2
#: Parameter slots have room for two layers; without it for eight, that are held where a pass turns.
LIMIT = "56MiB"


class Stack(torch.nn.Module):
    """Layers of one square matrix each, recomputed in backward where that is asked for."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)
        )
        self.recomputes = recomputes

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = rows.requires_grad_()
        for layer in self.layers:
            if self.recomputes:
                hidden = hidden + torch.tanh(checkpoint(layer, hidden, use_reentrant=False))
            else:
                hidden = hidden + torch.tanh(layer(hidden))
        return (hidden - rows).float().square().mean()


def config(drive: str, options: argparse.Namespace) -> dict[str, Any]:
    on_drive = {"device": "nvme", "nvme_path": drive}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": options.accumulation,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": options.sum_dtype},
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": on_drive,
            "offload_optimizer": on_drive,
            "sub_group_size": 8_000_000,
            "stage3_prefetch_bucket_size": 1 << 20,
            "stage3_max_reuse_distance": options.reuse_distance,
            "stage3_param_persistence_threshold": 0,
        },
        "steps_per_print": 1_000_000,
        "memascend": {
            **({} if options.no_limit else {"host_memory_limit": options.limit}),
            "streaming": {
                "optimizer": {
                    "state_dtype": options.state_dtype,
                    "during_backward": options.during_backward,
                }
            },
        },
    }


def train(engine: Any, steps: int, accumulation: int) -> None:
    for _ in range(steps * accumulation):
        rows = torch.randn(2, WIDTH).to(torch.bfloat16)
        engine.backward(engine(rows))
        engine.step()
    engine.optimizer.finish_walk()


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recomputes", action="store_true")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--sum-dtype", default="bf16")
    parser.add_argument("--reuse-distance", type=int, default=0)
    parser.add_argument("--state-dtype", default="fp32")
    parser.add_argument("--during-backward", action="store_true")
    parser.add_argument("--no-limit", action="store_true")
    parser.add_argument("--limit", default=LIMIT)
    return parser


def moved(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Train, and return what was planned and measured in each direction."""
    with tempfile.TemporaryDirectory(dir=".") as drive:
        settings = config(drive, options)
        with deepspeed.zero.Init(config_dict_or_path=settings, dtype=torch.bfloat16):
            model = Stack(options.recomputes)
        engine = deepspeed.initialize(model=model, config=settings)[0]
        train(engine, WARMUPS, options.accumulation)
        store, plan = engine.memascend.runtime.store, engine.memascend.runtime.plan
        before = store.stats()
        train(engine, STEPS, options.accumulation)
        after = store.stats()
        found = {
            name: {
                "planned": dict(planned),
                "measured": (after[counter] - before[counter]) // STEPS,
            }
            for name, counter, planned in (
                ("read", "bytes_read", plan.read_bytes),
                ("written", "bytes_written", plan.written_bytes),
            )
        }
        engine.destroy()
    return found


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    trainings = json.loads(sys.argv[1])
    found = [moved(parser().parse_args(options)) for options in trainings]
    print(json.dumps(found))
    leave()


if __name__ == "__main__":
    main()
