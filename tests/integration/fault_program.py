"""Trains on several ranks; on the last one the drive fails in the middle.

Started by tests/integration/test_faults.py. Rank 0 prints `step N`.
"""

from __future__ import annotations

import argparse
import errno
import json
from pathlib import Path
from typing import Any

import deepspeed
import torch

from memascend.errors import StoreError
from memascend.nvme.resident import ResidentStore
from tests.integration.checkpoint_program import build, train

MESSAGE = "the drive of this test is gone"


def break_drive(operation: str) -> None:
    """From now on every such transfer fails as one of a drive that was pulled out does."""

    def fail(*_: Any, **__: Any) -> Any:
        raise StoreError(errno.EIO, MESSAGE)

    setattr(ResidentStore, operation, fail)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("operation", choices=["read", "write"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    engine = build(json.loads(arguments.config.read_text()), seed=1)
    train(engine, 0, 1)
    if deepspeed.comm.get_rank() == deepspeed.comm.get_world_size() - 1:
        break_drive(arguments.operation)
    train(engine, 1, 3)
    print("went on", flush=True)


if __name__ == "__main__":
    main()
