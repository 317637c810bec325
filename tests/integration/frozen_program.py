"""Saves a model of which a half is frozen with one kind of offload, and loads it with another.

Started by test_frozen.py. Prints whether weights are equal, as JSON.
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


def config(backend: str, drive: str) -> dict[str, Any]:
    is_cpu = backend == "cpu"
    block = None if is_cpu else {"host_memory_limit": "10MiB"}
    found = deepspeed_config(Path(drive), device="cpu" if is_cpu else "nvme", block=block)
    found["zero_optimization"]["stage3_param_persistence_threshold"] = WIDTH + 1
    return found


def make(seed: int, backend: str, drive: str) -> Any:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)))
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
        engine.destroy()
        engine = make(2, options.loader, drive)
        before = weights(engine)
        path, _ = engine.load_checkpoint(
            options.folder, load_module_strict=not options.exclude_frozen
        )
        after = weights(engine)
        engine.destroy()
    print(json.dumps({"path": path, **compared(before, saved, after)}))
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
