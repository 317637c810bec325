"""Trains layers whose norms are a parameter group of their own; prints what walks waited for.

Started by test_overlap.py. The walk of each step stops before the last layer's matrix, until the
first layer of the next forward pass has computed. Prints, as JSON, for each step whether it had.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import deepspeed
import torch

import memascend  # noqa: F401  what the torch.backends entry point does in an installed copy
from memascend.streaming.optimizer.stream import OptimizerStream
from tests.support.process_group import leave

LAYERS, WIDTH, STEPS = 6, 256, 3
PATIENCE_S = 20.0


class Layer(torch.nn.Module):
    """A norm and a matrix, as in any transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH, bias=False)
        self.linear = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.computed = threading.Event()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of the same shape."""
        result = rows + torch.tanh(self.linear(self.norm(rows)))
        self.computed.set()
        return result


def config(drive: str, block: dict[str, Any]) -> dict[str, Any]:
    on_drive = {"device": "nvme", "nvme_path": drive}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": on_drive,
            "offload_optimizer": on_drive,
            "sub_group_size": WIDTH * WIDTH,
        },
        "steps_per_print": 1_000_000,
        "memascend": block,
    }


def hold_walks(weight: torch.nn.Parameter, wait: Callable[[], None]) -> None:
    """Have walks wait before the sub-group of a weight."""
    key, step = weight.nvme_swapper.key(weight), OptimizerStream.step

    def held(self: OptimizerStream, sub_group: Any, *arguments: Any) -> None:
        if any(member.key == key for member in sub_group.members):
            wait()
        step(self, sub_group, *arguments)

    OptimizerStream.step = held


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    met: list[bool] = []
    with tempfile.TemporaryDirectory(dir=".") as drive:
        settings = config(drive, {})
        with deepspeed.zero.Init(config_dict_or_path=settings, dtype=torch.bfloat16):
            model = torch.nn.Sequential(*(Layer() for _ in range(LAYERS)))
        groups = [
            {"params": [layer.linear.weight for layer in model], "weight_decay": 0.1},
            {"params": [layer.norm.weight for layer in model], "weight_decay": 0.0},
        ]
        engine = deepspeed.initialize(model=model, model_parameters=groups, config=settings)[0]
        computed = model[0].computed
        hold_walks(model[-1].linear.weight, lambda: met.append(computed.wait(PATIENCE_S)))
        for _ in range(STEPS):
            loss = engine(torch.randn(2, WIDTH).to(torch.bfloat16)).float().square().mean()
            engine.backward(loss)
            computed.clear()
            engine.step()
        engine(torch.randn(2, WIDTH).to(torch.bfloat16))
        engine.destroy()
    print(json.dumps(met))
    leave()


if __name__ == "__main__":
    main()
