"""One rank of a worker group on the emulated device: tests.parity.worker with another accelerator.

Started by `tests.parity.workers.WorkerGroup` as `python -m tests.device.worker --socket FD`.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import pytest

from tests.parity.cases import Case
from tests.parity.worker import handle_signals, prepare_deepspeed, serve

COPY_DELAYS_US = (20_000, 4_000)  # of even seeds, of odd ones
KERNEL_DELAY_US = 500


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=int, required=True)
    arguments = parser.parse_args()
    handle_signals()
    from tests.device.emulator import torch_device

    torch_device.install()

    import deepspeed

    import memascend  # noqa: F401  what the torch.backends entry point does in an installed copy
    from tests.device.emulator import accelerator

    accelerator.install()
    prepare_deepspeed()
    deepspeed.init_distributed(auto_mpi_discovery=False)
    serve(arguments.socket, run_case)
    os._exit(0)  # the threads of streams never end


def run_case(
    case: Case,
    config: dict[str, Any],
    *,
    seed: int = 0,
    mistake: str = "",
    registrar: str = "accelerator",
    stock_blocks: bool = True,
    beside: bool = False,
    looking: bool = False,
) -> dict[str, Any]:
    """Run a case as parity does, with delays.

    Args:
        case: What is trained.
        config: In DeepSpeed's words.
        seed: Of random delays; 0 for none.
        mistake: One of mistakes.py.
        registrar: Who page-locks the host memory of memascend: accelerator, driver or nobody.
        beside: The script gathers parameters by hand on a stream of its own; with memascend alone.
        looking: Hooks on the host's thread read gradients; with memascend alone.
        stock_blocks: A blocking copy from page-locked memory keeps the host, as CUDA's does.
    """
    from tests.device import beside as by_hand
    from tests.device import looks, mistakes
    from tests.device.emulator import accelerator, drive, torch_device
    from tests.parity import training

    core = torch_device.core
    core.synchronize()
    core.share_free_blocks()
    if seed:
        core.set_delays(seed, COPY_DELAYS_US[seed % 2], KERNEL_DELAY_US)
    else:
        core.set_delays(0, 0, 0)
    core.set_pinned_copies_block(stock_blocks)
    core.take_findings()
    core.take_waits()
    with pytest.MonkeyPatch.context() as patch:
        accelerator.register_through(registrar, patch)
        if mistake:
            mistakes.MISTAKES[mistake](patch)
        drive.tell_of_transfers(patch)
        drive_waits = drive.time_waits(patch)
        gathered = by_hand.gather_beside(patch) if beside else None
        looked = looks.look_in_hooks(patch) if looking else dict
        facts = training.run_case(case, config)
        facts["gathered_beside"] = 0 if gathered is None else gathered()
        facts["host_looks"] = looked()
    core.synchronize()
    facts["findings"] = core.take_findings()
    facts["waits"] = [*core.take_waits(), *drive_waits()]
    return facts


if __name__ == "__main__":
    main()
