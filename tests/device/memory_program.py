"""Trains; one step has too little device memory, and is tried again with a smaller batch.

Started by test_memory.py with a DeepSpeed configuration and a number of limits to try. Prints a
line of JSON: what came of an undisturbed run, and of one for each limit, lowest first.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.device.emulator import torch_device

core = torch_device.install()

import deepspeed  # noqa: E402
import torch  # noqa: E402

from tests.device.emulator import accelerator  # noqa: E402

accelerator.install()

from tests.integration import retry_program  # noqa: E402

ROWS, ROWS_THAT_DO_NOT_FIT = 32, 1024
STEPS, FAILING_STEP = 3, 1
ROOM_STEP_BYTES = 6 << 20


class Scale(torch.nn.Module):
    """In the place of a norm, whose backward pass the emulated device does not know."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.weight


def fail(engine: Any, room_bytes: int) -> str:
    """Run a pass with so much more memory; say where it failed, "" when it did not."""
    core.synchronize()
    core.set_limit(core.memory()["allocated"] + room_bytes)
    try:
        retry_program.pass_over(engine, FAILING_STEP, ROWS_THAT_DO_NOT_FIT)
    except torch.OutOfMemoryError:
        text = traceback.format_exc()
        phase = "backward" if "engine.backward" in text else "forward"
        return f"{'gather' if 'parameters/gather.py' in text else 'compute'} in {phase}"
    finally:
        core.set_limit(0)
    return ""


def result(config: dict[str, Any], room_bytes: int) -> dict[str, Any]:
    """What comes of a run whose second step is first tried with little room; 0: it is not."""
    core.synchronize()
    core.share_free_blocks()
    core.take_findings()
    losses, where = [], ""
    with retry_program.trained(config) as engine:
        for step in range(STEPS):
            if step == FAILING_STEP and room_bytes:
                where = fail(engine, room_bytes)
            loss = retry_program.pass_over(engine, step, ROWS)
            engine.step()
            losses.append(loss.item().hex())
        norm = float(engine.get_global_grad_norm()).hex()
        next(engine.module.parameters()).nvme_swapper.drop_unused()
        runtime = engine.memascend.runtime
        with runtime.lock:
            lost = runtime.pool.held_bytes - runtime.pool.free_bytes
        weights = hashlib.sha256()
        for parameter in engine.module.parameters():
            full = deepspeed.utils.safe_get_full_fp32_param(parameter)
            weights.update(full.contiguous().cpu().numpy().tobytes())
    numbers = [*losses, norm, weights.hexdigest()]
    core.synchronize()
    findings = core.take_findings()
    return {"where": where, "numbers": numbers, "lost": lost, "findings": findings}


def main() -> None:
    path, count = Path(sys.argv[1]), int(sys.argv[2])
    retry_program.WIDTH = 1024
    retry_program.Model = functools.partial(retry_program.Model, Scale)  # type: ignore[misc]
    deepspeed.init_distributed(auto_mpi_discovery=False)
    config = json.loads(path.read_text())
    found = [result(config, place * ROOM_STEP_BYTES) for place in range(count + 1)]
    print(json.dumps(found), flush=True)
    os._exit(0)  # the threads of streams never end


if __name__ == "__main__":
    main()
