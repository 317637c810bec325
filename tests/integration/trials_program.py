"""Makes engines one after the other, and destroys each: for training, and for inference.

Started by test_trials.py. Prints one line of JSON: behind each trial the descriptors, threads,
memory and bytes of unnamed files of the process, and how many objects of ours are alive.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from typing import Any

import deepspeed
import torch

import memascend  # noqa: F401  what the torch.backends entry point does in an installed copy
from memascend.deepspeed.attach.attachment import Attachment
from memascend.runtime import Runtime
from tests.integration.programs import BLOCK, training_config
from tests.support.process_group import leave, say

TRIALS, WIDTH = 20, 96


def kept() -> dict[str, int]:
    """What the process has behind a trial."""
    gc.collect()
    deleted = 0
    names = os.listdir("/proc/self/fd")
    for name in names:
        try:
            if os.readlink(f"/proc/self/fd/{name}").endswith("(deleted)"):
                deleted += os.stat(f"/proc/self/fd/{name}").st_blocks
        except OSError:  # that of the listing itself
            continue
    ours = sum(isinstance(one, Attachment | Runtime) for one in gc.get_objects())
    return {
        "descriptors": len(names),
        "threads": len(os.listdir("/proc/self/task")),
        "blocks": deleted,
        "ours": ours,
        "anonymous_bytes": anonymous_bytes(),
    }


def anonymous_bytes() -> int:
    """The resident memory of the process that is no file's."""
    with open("/proc/self/status") as lines:
        (kib,) = (line.split()[1] for line in lines if line.startswith("RssAnon:"))
    return int(kib) << 10


def model() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)))


def train(engine: Any) -> None:
    for _ in range(3):
        engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
        engine.step()


def trial(config: dict[str, Any], number: int) -> None:
    if number % 2:
        inference = json.loads(json.dumps(config))
        del inference["optimizer"], inference["zero_optimization"]["offload_optimizer"]
        engine = deepspeed.initialize(model=model(), config=inference)[0]
        with torch.no_grad():
            engine(torch.ones(2, WIDTH))
    else:
        engine = deepspeed.initialize(model=model(), config=config)[0]
        train(engine)
    module = engine.module
    engine.destroy()
    del engine
    gc.collect()
    # As with CPU offload: parameters are the model's, and it may be trained by another engine.
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        assert all(param.isfinite().all() and param.any() for param in module.parameters())
    if number == 2:
        again = deepspeed.initialize(model=module, config=config)[0]
        train(again)
        again.destroy()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("drive")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    config = training_config(arguments.drive, BLOCK | {"status": False}, 1)
    del config["bf16"]
    config["zero_optimization"]["stage3_prefetch_bucket_size"] = 20_000
    config["zero_optimization"]["stage3_max_reuse_distance"] = 0
    found = []
    for number in range(TRIALS):
        trial(config, number)
        found.append(kept())
    say("RESULT " + json.dumps(found))
    leave()


if __name__ == "__main__":
    main()
