"""Saves a model of which a part is frozen with one kind of offload, and loads it with another.

Started by test_frozen.py. Frozen are floats, and whole numbers such as bitsandbytes packs weights
into. Prints whether weights are equal, as JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import deepspeed
import torch

import memascend  # noqa: F401  what the torch.backends entry point does in an installed copy
from tests.integration.programs import deepspeed_config
from tests.support.process_group import leave

#: Several chunks of a staging slot within the limit, and a part that does not end with a page.
WIDTH = 1500


class Packed(torch.nn.Module):
    """Adds up frozen parameters that are no floats, a large one and a small one."""

    def __init__(self) -> None:
        super().__init__()
        large, small = torch.randint(0, 200, (WIDTH, WIDTH)), torch.randint(0, 1 << 40, (WIDTH,))
        self.large = torch.nn.Parameter(large.to(torch.uint8), requires_grad=False)
        self.small = torch.nn.Parameter(small, requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + (self.large[-1] + self.small % 7).to(rows.dtype)


def config(backend: str, drive: str) -> dict[str, Any]:
    is_cpu = backend == "cpu"
    block = None if is_cpu else {"host_memory_limit": "10MiB"}
    found = deepspeed_config(Path(drive), device="cpu" if is_cpu else "nvme", block=block)
    found["zero_optimization"]["stage3_param_persistence_threshold"] = WIDTH + 1
    return found


def make(seed: int, backend: str, drive: str) -> Any:
    torch.manual_seed(seed)
    linear = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
    model = torch.nn.Sequential(*linear, Packed())
    torch.nn.init.normal_(model[0].bias)
    model[0].requires_grad_(False)
    engine = deepspeed.initialize(model=model, config=config(backend, drive))[0]
    rows = torch.ones(1, WIDTH, dtype=torch.bfloat16)
    engine.backward(engine(rows).float().sum())
    engine.step()
    return engine


def weights(engine: Any) -> list[torch.Tensor]:
    found = []
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found.append(parameter.data.clone())
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("saver", choices=("memascend", "cpu"))
    parser.add_argument("loader", choices=("memascend", "cpu"))
    parser.add_argument("folder")
    parser.add_argument("--exclude-frozen", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    with tempfile.TemporaryDirectory(dir=".") as drive:
        engine = make(1, options.saver, drive)
        saved = weights(engine)
        engine.save_checkpoint(options.folder, exclude_frozen_parameters=options.exclude_frozen)
        engine.save_16bit_model(options.folder)
        engine.destroy()
        engine = make(2, options.loader, drive)
        before = weights(engine)
        path, _ = engine.load_checkpoint(
            options.folder, load_module_strict=not options.exclude_frozen
        )
        after = weights(engine)
        engine.destroy()
    exported = torch.load(Path(options.folder) / "pytorch_model.bin").values()
    equal = [torch.equal(*pair) for pair in zip(saved, exported, strict=True)]
    print(json.dumps({"path": path, "exported": equal, **compared(before, saved, after)}))
    leave()


def compared(
    before: list[torch.Tensor], saved: list[torch.Tensor], after: list[torch.Tensor]
) -> dict[str, list[bool]]:
    return {
        "as saved": [torch.equal(*pair) for pair in zip(saved, after, strict=True)],
        "as before": [torch.equal(*pair) for pair in zip(before, after, strict=True)],
    }


if __name__ == "__main__":
    main()
