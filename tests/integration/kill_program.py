"""Trains, saves after every step, and goes on from the last checkpoint where there is one.

Started by tests/integration/kill_runs.py, which kills it, and test_signals.py, which ends it.
Prints what it is about to do.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch

from memascend.deepspeed.parameters.gather import swapper_of
from tests.integration.checkpoint_program import build, print_masters, train
from tests.integration.kill_runs import BESIDE_THE_WALK
from tests.support.process_group import leave, say


def hold_the_walk(engine: Any) -> None:
    """Has the next walk stop before its last sub-group, for good: whoever looks finds it so."""
    walk = engine.memascend.runtime.walk
    start = walk.start

    def start_held(steps: Any, places: Any, end: Any) -> None:
        start([*steps[:-1], lambda note: threading.Event().wait()], places, end)

    walk.start = start_held


def die_beside_the_walk(engine: Any) -> None:
    """Kills this process while its last step goes on behind it; says so if it does."""
    last = engine.optimizer.fp16_groups[-1][-1]
    key = swapper_of(last).key(last)
    if not engine.memascend.runtime.walk.has_passed(key):
        say(BESIDE_THE_WALK)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--exit-status", type=int, help="exit with this when told to end")
    parser.add_argument("--die-behind", type=int, help="be killed when this step has returned")
    parser.add_argument("--timeout-s", type=float, help="wait so long for another rank")
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
    say(f"ready {engine.global_steps}")
    for step in range(engine.global_steps, arguments.steps):
        say("in a step")
        if step == arguments.die_behind:
            hold_the_walk(engine)
        train(engine, step, 1)
        if step == arguments.die_behind:
            die_beside_the_walk(engine)
        say("in a save")
        engine.save_checkpoint(str(arguments.checkpoints))
        say(f"saved {step + 1}")
    print_masters(engine, "end")
    engine.destroy()
    leave()


if __name__ == "__main__":
    main()
