"""Trains a few steps, and prints what of it could be seen meanwhile and at the end, as JSON.

Started by test_monitor.py.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import deepspeed
import torch

import memascend  # noqa: F401  what the torch.backends entry point does in an installed copy
from memascend.monitor import status_file
from memascend.monitor.runs import find_run, ranks_of
from memascend.monitor.status import as_json
from tests.support.process_group import leave

WIDTH, TOKENS, STEPS, ACCUMULATION = 256, 32, 4, 2


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(128, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return hidden.float().square().mean()


def config(drive: str, folder: Path) -> dict[str, Any]:
    on_drive = {"device": "nvme", "nvme_path": drive}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 100, "warmup_num_steps": 2},
        },
        "zero_optimization": {
            "stage": 3,
            "offload_param": on_drive,
            "offload_optimizer": on_drive,
            "stage3_param_persistence_threshold": 0,
        },
        "csv_monitor": {"enabled": True, "output_path": str(folder / "csv"), "job_name": "job"},
        "steps_per_print": 1_000_000,
        "memascend": {"status": str(folder / "status"), "host_memory_limit": "64MiB"},
    }


def seen(folder: Path) -> dict[str, Any]:
    """Return what another process would read now."""
    (rank,) = ranks_of(find_run(str(folder / "status")))
    assert rank.status is not None, rank.problem
    return {"is_alive": rank.is_alive, "status": json.loads(as_json(rank.status))}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    status_file.INTERVAL_S = 0.0  # the test shall not have to wait
    deepspeed.init_distributed(dist_backend="gloo")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=".") as drive:
        settings = config(drive, folder)
        with deepspeed.zero.Init(config_dict_or_path=settings, dtype=torch.bfloat16):
            model = Model()
        engine = deepspeed.initialize(model=model, config=settings)[0]
        for _ in range(STEPS * ACCUMULATION):
            loss = engine(input_ids=torch.randint(0, 128, (2, TOKENS)))
            found["backward"] = seen(folder)
            engine.backward(loss)
            engine.step()
        found["stepped"] = seen(folder)
        engine.destroy()
    found["finished"] = seen(folder)
    found["csv"] = {
        path.stem: path.read_text().split() for path in (folder / "csv").glob("**/*.csv")
    }
    print(json.dumps(found))
    leave()


if __name__ == "__main__":
    main()
