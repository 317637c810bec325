"""Trains leaf modules of several matrices with CPU offload, then from the drive; prints losses.

Started by test_gathers.py with several ranks. A leaf's parameters are fetched together and waited
for in the order of a set, which each rank has its own of. An evaluation in the middle leaves what
was gathered ahead unused. Prints, as JSON, what each rank found: the losses of one and the other.
"""

from __future__ import annotations

import json
import tempfile
from typing import Any

import deepspeed
import torch
from deepspeed.utils import set_z3_leaf_modules

import memascend  # noqa: F401  what the torch.backends entry point does in an installed copy
from tests.support.process_group import leave

#: Shards of more than a MiB on each of two ranks: smaller ones would stay in host memory.
LAYERS, MATRICES, WIDTH, STEPS = 4, 3, 1088, 6
EVALUATED_STEP = 3


class Leaf(torch.nn.Module):
    """Matrices of its children, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        linears = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(MATRICES))
        self.linears = torch.nn.ModuleList(linears)
        self.own = torch.nn.Parameter(torch.eye(WIDTH) * 0.1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of the same shape."""
        for linear in self.linears:
            rows = rows + torch.tanh(linear(rows))
        return rows + rows @ self.own


def config(offload: dict[str, str], block: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": offload,
            "offload_optimizer": offload,
            "stage3_prefetch_bucket_size": 3 * WIDTH * WIDTH,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
        },
        "steps_per_print": 1_000_000,
        **block,
    }


def losses(settings: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=settings, dtype=torch.bfloat16):
        model = torch.nn.Sequential(*(Leaf() for _ in range(LAYERS)))
    set_z3_leaf_modules(model, [Leaf])
    engine = deepspeed.initialize(model=model, config=settings)[0]
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    found = []
    for step in range(STEPS):
        # DeepSpeed lets go of a first leaf before its backward where no input has a gradient.
        rows = torch.randn(2, WIDTH, generator=generator).bfloat16().requires_grad_()
        if step == EVALUATED_STEP:
            with torch.no_grad():
                found.append(engine(rows).float().sum().item())
        loss = engine(rows).float().square().mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    engine.destroy()
    return found


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    on_cpu = losses(config({"device": "cpu"}, {}))
    with tempfile.TemporaryDirectory(dir=".") as drive:
        on_drive = losses(config({"device": "nvme", "nvme_path": drive}, {"memascend": {}}))
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, [on_cpu, on_drive])
    if torch.distributed.get_rank() == 0:
        print(json.dumps(found))
    leave()


if __name__ == "__main__":
    main()
