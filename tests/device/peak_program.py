"""Trains with resident parameters on a slow device; prints how much memory it held at its peak.

Started by test_memory.py with a DeepSpeed configuration and limits of what may have been let go
while the device still computes with it, in bytes. Prints a line of JSON: the bytes of a
parameter, and for each limit the peaks of a forward and a backward pass above what was held
before.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.device.emulator import torch_device

core = torch_device.install()

import deepspeed  # noqa: E402
import torch  # noqa: E402

from memascend.deepspeed.parameters import build  # noqa: E402
from tests.device.emulator import accelerator  # noqa: E402

accelerator.install()

WIDTH, LAYERS, ROWS = 512, 48, 4
COPY_DELAY_US, KERNEL_DELAY_US = 2_000, 40_000
SEED = 2


class Layers(torch.nn.Module):
    """As many as a host that is far ahead gathers before the first has computed.

    Only the first is trained: the memory of gradients would hide what the others take.
    """

    def __init__(self) -> None:
        super().__init__()
        made = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.layers = torch.nn.ModuleList(made)
        for layer in list(self.layers)[1:]:
            layer.requires_grad_(False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = torch.tanh(layer(rows))
        return rows.float().square().mean()


def held_bytes() -> int:
    """Device memory at the peak, with what was freed and is used by a stream still."""
    return core.memory()["held_peak"]


def peaks(config: dict[str, Any], limit_bytes: int) -> dict[str, int]:
    """What the second step holds at most; in the first one DeepSpeed records the order of use."""
    build.released_bytes_max = lambda device_bytes: limit_bytes
    torch.manual_seed(1)
    with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
        model = Layers()
    engine = deepspeed.initialize(model=model, config=config)[0]
    found = {}
    for step in range(2):
        batch = torch.randn(ROWS, WIDTH).to(engine.device, torch.bfloat16)
        core.synchronize()
        core.set_delays(SEED if step else 0, COPY_DELAY_US, KERNEL_DELAY_US)
        for name in ("forward", "backward"):
            torch.empty(1, device=engine.device)  # what has passed is only found now
            core.reset_peak()
            before = held_bytes()
            if name == "forward":
                loss = engine(batch)
            else:
                engine.backward(loss)
            found[name] = held_bytes() - before
            core.synchronize()
        core.set_delays(0, 0, 0)
        engine.step()
    engine.destroy()
    return found


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text())
    deepspeed.init_distributed(auto_mpi_discovery=False)
    found = [peaks(config, int(limit)) for limit in sys.argv[2:]]
    parameter_bytes = WIDTH * WIDTH * torch.bfloat16.itemsize
    print(json.dumps({"parameter": parameter_bytes, "peaks": found}), flush=True)
    os._exit(0)  # the threads of streams never end


if __name__ == "__main__":
    main()
