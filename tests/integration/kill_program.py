"""Trains, saves as it goes, and goes on from the last checkpoint where there is one.

Started by tests/integration/kill_runs.py, which kills it, and test_signals.py, which ends it.
Rank 0 prints what it is about to do.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch

from memascend.deepspeed.parameters.gather import swapper_of
from tests.integration.checkpoint_program import build, print_masters, train
from tests.integration.kill_runs import BESIDE_THE_WALK, WALK_BEGINS, WALK_ENDS
from tests.support.process_group import leave, say


def hold_the_walk(engine: Any) -> None:
    """Has the next walk stop before its last sub-group, for good: whoever looks finds it so."""
    walk = engine.memascend.runtime.background
    start = walk.start

    def start_held(steps: Any, places: Any, end: Any) -> None:
        start([*steps[:-1], lambda note: threading.Event().wait()], places, end)

    walk.start = start_held


def die_beside_the_walk(engine: Any) -> None:
    """Kills this process while its last step goes on behind it; says so if it does."""
    walk = engine.memascend.runtime.background
    first, last = (engine.optimizer.fp16_groups[number][number] for number in (0, -1))
    walk.wait_for([swapper_of(first).key(first)])
    if not walk.has_passed(swapper_of(last).key(last)):
        say(BESIDE_THE_WALK)
    os.kill(os.getpid(), signal.SIGKILL)


def tell(line: str) -> None:
    """Prints a line on rank 0."""
    if deepspeed.comm.get_rank() == 0:
        say(line)


def slow_walks(engine: Any, seconds: float) -> None:
    """Has each sub-group of a walk take so long at least; walks tell when they begin and end."""
    walk = engine.memascend.runtime.background
    start = walk.start

    def start_slow(steps: Any, places: Any, end: Callable[[], object]) -> None:
        def slow(step: Any) -> Any:
            return lambda note: (time.sleep(seconds), step(note))

        def end_told() -> None:
            end()
            tell(WALK_ENDS)

        tell(WALK_BEGINS)
        start([slow(step) for step in steps], places, end_told)

    walk.start = start_slow


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--exit-status", type=int, help="exit with this when told to end")
    parser.add_argument("--die-behind", type=int, help="be killed when this step has returned")
    parser.add_argument("--timeout-s", type=float, help="wait so long for another rank")
    parser.add_argument("--save-every", type=int, default=1, help="steps; after the last always")
    parser.add_argument("--slow-s", type=float, default=0.0, help="of each sub-group of a walk")
    arguments = parser.parse_args()
    if arguments.exit_status is not None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(arguments.exit_status))
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    is_resumed = (arguments.checkpoints / "latest").is_file()
    # Another seed: what is not loaded shows.
    engine = build(json.loads(arguments.config.read_text()), seed=2 if is_resumed else 1)
    if is_resumed:
        engine.load_checkpoint(str(arguments.checkpoints))
    if arguments.timeout_s is not None:  # not before: one of them may start much later
        timeout = timedelta(seconds=arguments.timeout_s)
        torch.distributed.distributed_c10d._set_pg_timeout(timeout, None)
    if arguments.slow_s:
        slow_walks(engine, arguments.slow_s)
    tell(f"ready {engine.global_steps}")
    for step in range(engine.global_steps, arguments.steps):
        tell("in a step")
        if step == arguments.die_behind:
            hold_the_walk(engine)
        train(engine, step, 1)
        if step == arguments.die_behind:
            die_beside_the_walk(engine)
        if (step + 1) % arguments.save_every == 0 or step + 1 == arguments.steps:
            tell("in a save")
            engine.save_checkpoint(str(arguments.checkpoints))
            tell(f"saved {step + 1}")
    print_masters(engine, "end")
    engine.destroy()
    leave()


if __name__ == "__main__":
    main()
