"""Trains a little, saves or loads a checkpoint, trains on: what a user's script does.

Started by tests/deepspeed/checkpoint/test_engine.py. Rank 0 prints
`step N loss X` with every bit, and `drive WHEN NAMES`: what is visible below nvme_path then.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch

import memascend.errors  # also does what the torch.backends entry point does in an installed copy
from memascend.checkpoint.files import SummedFile
from tests.support.process_group import leave, say

WIDTH = 1024
MEET_TIMEOUT_S = 120.0


class Model(torch.nn.Module):
    """Two matrices large enough for the drive, with small tensors between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        # Without a bias: DeepSpeed keeps a sub-group as small as that in memory, and its NVMe
        # checkpoints leave it out.
        self.second = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.relu(self.first(rows)))
        return (self.second(hidden) - rows).float().square().mean()


def build(config: dict[str, Any], seed: int) -> Any:
    torch.manual_seed(seed)
    with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
        model = Model()
    return deepspeed.initialize(model=model, config=config)[0]


def train(engine: Any, first: int, count: int) -> None:
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(100 * step + deepspeed.comm.get_rank())
        rows = torch.randn(4, WIDTH, generator=generator).to(engine.device, torch.bfloat16)
        loss = engine(rows)
        engine.backward(loss)
        engine.step()
        if deepspeed.comm.get_rank() == 0:
            say(f"step {step} loss {loss.item().hex()}")


def print_masters(engine: Any, when: str) -> None:
    for name, parameter in engine.module.named_parameters():
        values = deepspeed.utils.safe_get_full_fp32_param(parameter)
        if deepspeed.comm.get_rank() == 0:
            digest = hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()
            say(f"master {when} {name} {digest}")


def print_drive(folder: Path, when: str) -> None:
    deepspeed.comm.barrier()
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    if deepspeed.comm.get_rank() == 0:
        say(f"drive {when} {json.dumps(names)}")
    deepspeed.comm.barrier()  # no rank goes on to save while another still looks


def meet(folder: Path, count: int) -> None:
    """Waits until `count` runs are here."""
    (folder / f"run-{os.getpid()}").touch()
    deadline = time.monotonic() + MEET_TIMEOUT_S
    while len(list(folder.glob("run-*"))) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not {count} runs in {folder} within {MEET_TIMEOUT_S} s")
        time.sleep(0.05)


def kill_in_the_middle_of_a_save() -> None:
    """Has each rank kill itself when it begins its third file; one that lived would tidy up."""
    create, left = SummedFile.create, [2]

    def count(path: Path, *more: Any) -> Any:
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return create(path, *more)

    SummedFile.create = count  # type: ignore[method-assign,assignment]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("drive", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("action", choices=["save", "killed", "load", "weights", "refused"])
    parser.add_argument("--also", type=Path, nargs="*", default=[], help="to refuse as well")
    parser.add_argument("--meet", type=Path, help="save when two runs are in this folder")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    config = json.loads(arguments.config.read_text())
    saves = arguments.action in ("save", "killed")
    engine = build(config, seed=1 if saves else 2)
    if saves:
        if arguments.action == "killed":
            kill_in_the_middle_of_a_save()
        train(engine, 0, 2)
        if arguments.meet is not None:
            meet(arguments.meet, 2)
        print_drive(arguments.drive, "before")
        engine.save_checkpoint(str(arguments.checkpoint), tag="here")
        print_masters(engine, "saved")
    elif arguments.action == "refused":
        for checkpoint in (arguments.checkpoint, *arguments.also):
            print_masters(engine, "before")
            try:
                engine.load_checkpoint(str(checkpoint), tag="here")
            except memascend.errors.CheckpointError as error:
                say(f"refused by rank {deepspeed.comm.get_rank()}: {error}")
            print_masters(engine, "after")
    else:
        print_drive(arguments.drive, "before")
        has_states = arguments.action == "load"
        path, _ = engine.load_checkpoint(
            str(arguments.checkpoint), tag="here", load_optimizer_states=has_states
        )
        assert path is not None
        print_masters(engine, "loaded")
    print_drive(arguments.drive, "after")
    train(engine, 2, 2)
    if arguments.meet is not None:
        meet(arguments.meet, 2)
    engine.destroy()
    leave()


if __name__ == "__main__":
    main()
