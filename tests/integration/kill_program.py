"""Trains, saves after every step, and goes on from the last checkpoint where there is one.

Started by tests/integration/kill_runs.py, which kills it, and test_signals.py, which ends it.
Prints what it is about to do.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path

import deepspeed
import torch

from tests.integration.checkpoint_program import build, print_masters, train


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--exit-status", type=int, help="exit with this when told to end")
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
    print(f"ready {engine.global_steps}", flush=True)
    for step in range(engine.global_steps, arguments.steps):
        print("in a step", flush=True)
        train(engine, step, 1)
        print("in a save", flush=True)
        engine.save_checkpoint(str(arguments.checkpoints))
        print(f"saved {step + 1}", flush=True)
    print_masters(engine, "end")
    engine.destroy()
    deepspeed.comm.destroy_process_group()
    time.sleep(0.5)  # gloo's threads need the GIL once more


if __name__ == "__main__":
    main()
