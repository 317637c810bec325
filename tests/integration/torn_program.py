"""Trains; the drive fails in the middle of a step; says what can still be done.

Started by tests/integration/test_faults.py, in one process. A script may catch the error, and go on
with what it has: that must not be weights of two steps.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch

from memascend.checkpoint.files import SummedFile
from memascend.errors import CheckpointError, StoreError, TornStepError
from memascend.nvme.resident import ResidentStore
from tests.integration.checkpoint_program import WIDTH, build, train
from tests.support.process_group import leave, say


def fail_writes_from(count: int) -> Callable[[], None]:
    """The drive takes so many more writes; gives what ends that."""
    write, numbers = ResidentStore.write, itertools.count()

    def failing(self: ResidentStore, **keywords: Any) -> Any:
        if next(numbers) >= count:
            raise StoreError(errno.EIO, "the drive of this test failed")
        return write(self, **keywords)

    def restore() -> None:
        ResidentStore.write = write  # type: ignore[method-assign]

    ResidentStore.write = failing  # type: ignore[method-assign,assignment]
    return restore


def save_on_a_full_drive(engine: Any, folder: Path) -> None:
    """The second file finds no room."""
    create, numbers = SummedFile.create, itertools.count()

    def failing(path: Path, *more: Any) -> Any:
        if next(numbers) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(path, *more)

    SummedFile.create = failing  # type: ignore[method-assign,assignment]
    try:
        engine.save_checkpoint(str(folder), tag="full")
    finally:
        SummedFile.create = create  # type: ignore[method-assign]


def what_happens(name: str, action: Callable[[], object]) -> bool:
    """Says it; whether the action came to its end."""
    try:
        action()
    except (StoreError, TornStepError, CheckpointError) as error:
        say(f"{name}: {type(error).__name__}: {error}")
        return False
    say(f"{name}: done")
    return True


def failing_load(engine: Any, checkpoints: Path) -> None:
    restore = fail_writes_from(3)
    try:
        engine.load_checkpoint(str(checkpoints))
    finally:
        restore()


def evaluate(engine: Any) -> None:
    with torch.no_grad():
        engine(torch.ones(4, WIDTH, dtype=torch.bfloat16))


def use_values(engine: Any, checkpoints: Path, after: str) -> None:
    """Try all that reads weights or states."""
    *_, parameter = engine.module.parameters()
    what_happens(f"step after {after}", engine.optimizer.step)
    what_happens(f"save after {after}", lambda: engine.save_checkpoint(str(checkpoints), tag="bad"))
    what_happens(f"forward after {after}", lambda: evaluate(engine))
    what_happens(
        f"value after {after}", lambda: deepspeed.utils.safe_get_full_fp32_param(parameter)
    )
    what_happens(
        f"weights after {after}",
        lambda: engine.load_checkpoint(str(checkpoints), load_optimizer_states=False),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("checkpoints", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    engine = build(json.loads(arguments.config.read_text()), seed=1)
    train(engine, 0, 1)
    engine.save_checkpoint(str(arguments.checkpoints), tag="good")
    what_happens("full save", lambda: save_on_a_full_drive(engine, arguments.checkpoints))
    train(engine, 1, 2)
    engine.load_checkpoint(str(arguments.checkpoints))
    step = engine.optimizer.step

    def failing_step(*positional: Any, **keywords: Any) -> None:
        restore = fail_writes_from(3)
        try:
            step(*positional, **keywords)
            engine.optimizer.finish_walk()  # in tiles it goes on behind its caller
        finally:
            restore()

    engine.optimizer.step = failing_step
    what_happens("failing step", lambda: train(engine, 1, 1))
    engine.optimizer.step = step
    use_values(engine, arguments.checkpoints, "step")
    what_happens("failing load", lambda: failing_load(engine, arguments.checkpoints))
    use_values(engine, arguments.checkpoints, "load")
    if what_happens("load", lambda: engine.load_checkpoint(str(arguments.checkpoints))):
        evaluate(engine)
        train(engine, 1, 2)
    engine.destroy()
    leave()


if __name__ == "__main__":
    main()
