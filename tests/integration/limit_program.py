"""Trains a stack of layers, at will under a hard cap of the process's memory.

Started by test_host_memory.py. Prints `step N loss X` with every bit, and `data WHEN BYTES`: the
process's private writable memory, which is what RLIMIT_DATA caps.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import resource
from pathlib import Path
from typing import Any

import deepspeed
import torch

import memascend  # noqa: F401  what the torch.backends entry point does in an installed copy
from tests.support.process_group import leave, say
from tests.support.rough_muon import leave_updates_as_they_are


class Stack(torch.nn.Module):
    """Layers of one square matrix each."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(width, width, bias=False) for _ in range(layers)
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = rows
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return (hidden - rows).float().square().mean()


def train(config: dict[str, Any], *, layers: int, width: int, steps: int) -> Any:
    """Builds a model and trains it; gives the engine."""
    torch.manual_seed(1)
    with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
        model = Stack(layers, width)
    engine = deepspeed.initialize(model=model, config=config)[0]
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randn(2, width, generator=generator).to(torch.bfloat16)
        loss = engine(rows)
        engine.backward(loss)
        engine.step()
        say(f"step {step} loss {loss.item().hex()}")
    return engine


def on_the_cpu(config: dict[str, Any]) -> dict[str, Any]:
    """The same training by DeepSpeed's CPU offload."""
    config = copy.deepcopy(config)
    config.pop("memascend", None)
    for section in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][section] = {"device": "cpu", "pin_memory": False}
    return config


def data_bytes() -> int:
    """VmData: private writable mappings."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no line VmData")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="train by CPU offload instead")
    parser.add_argument("--keep", action="store_true", help="end without engine.destroy()")
    parser.add_argument("--cap-bytes", type=int, help="beyond what a trained tiny model leaves")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    config = json.loads(arguments.config.read_text())
    config = on_the_cpu(config) if arguments.cpu else config
    leave_updates_as_they_are()
    if arguments.cap_bytes is not None:
        # Imports, compiled ops, threads and caches: what any training has.
        train(on_the_cpu(config), layers=1, width=16, steps=1).destroy()
        gc.collect()
        baseline_bytes = data_bytes()
        say(f"data before {baseline_bytes}")
        cap_bytes = baseline_bytes + arguments.cap_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (cap_bytes, cap_bytes))
        say("capped")
    engine = train(config, layers=arguments.layers, width=arguments.width, steps=arguments.steps)
    say(f"data after {data_bytes()}")
    if not arguments.keep:
        engine.destroy()
    leave()


if __name__ == "__main__":
    main()
