"""Saves and loads on two ranks, of which the last one fails alone; then all go on.

Started by tests/integration/test_lone_saves.py. Each rank prints `WHEN on RANK: ERROR`; the first
one prints the losses, and `latest WHEN TAG`.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch

from memascend.errors import CheckpointError, StoreError, TornStepError
from memascend.nvme.resident import ResidentStore
from tests.integration.checkpoint_program import WIDTH, build, train
from tests.support.process_group import leave, say


def is_last() -> bool:
    return bool(deepspeed.comm.get_rank() == deepspeed.comm.get_world_size() - 1)


def what_happens(when: str, action: Callable[[], object]) -> None:
    try:
        action()
        text = "done"
    except (CheckpointError, StoreError, TornStepError) as error:
        text = f"{type(error).__name__}: {error}".replace("\n", " ")
    say(f"{when} on {deepspeed.comm.get_rank()}: {text}")


@contextmanager
def failing(owner: Any, name: str, call: int, error: Exception) -> Iterator[None]:
    """Have a method fail on the last rank from one of its calls on, counted from 0."""
    original, numbers = getattr(owner, name), itertools.count()

    def fail(*arguments: Any, **keywords: Any) -> Any:
        if next(numbers) >= call:
            raise error
        return original(*arguments, **keywords)

    if is_last():
        setattr(owner, name, fail)
    try:
        yield
    finally:
        setattr(owner, name, original)


def fail_to_save(engine: Any, folder: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    for call, part in enumerate(["module", "optimizer"]):
        with failing(engine.checkpoint_engine, "save", call, full):
            what_happens(part, lambda: engine.save_checkpoint(str(folder), tag="full"))
    own = folder / "own" if is_last() else folder
    what_happens("own folder", lambda: engine.save_checkpoint(str(own), tag="apart"))
    what_happens("own latest", lambda: engine.load_checkpoint(str(own)))


def fail_to_load(engine: Any, folder: Path) -> None:
    lost = StoreError(errno.EIO, "the drive of this test is gone")
    with failing(ResidentStore, "write", 3, lost):
        what_happens("load", lambda: engine.load_checkpoint(str(folder)))
    rows = torch.ones(4, WIDTH, dtype=torch.bfloat16)
    what_happens("forward", lambda: engine(rows))
    what_happens("save", lambda: engine.save_checkpoint(str(folder), tag="torn"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("checkpoints", type=Path)
    arguments = parser.parse_args()
    folder: Path = arguments.checkpoints
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    engine = build(json.loads(arguments.config.read_text()), seed=1)
    train(engine, 0, 1)
    engine.save_checkpoint(str(folder), tag="good")
    fail_to_save(engine, folder)
    train(engine, 1, 2)
    fail_to_load(engine, folder)
    engine.load_checkpoint(str(folder))
    train(engine, 1, 2)
    engine.destroy()
    leave()


if __name__ == "__main__":
    main()
