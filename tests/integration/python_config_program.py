"""Trains with a configuration that a Python program made, and with the same one as JSON has it.

Started by tests/integration/test_python_config.py; prints the losses of each, digit by digit, and
what memascend read from each.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.config import DeepSpeedConfig, DtypeEnum
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    OffloadDeviceEnum,
)

from memascend import PlanRequest
from tests.integration.checkpoint_program import build, train


def from_python(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration in DeepSpeed's own types, as its tests and many scripts write it."""
    zero = config["zero_optimization"]
    drive = zero["offload_param"]["nvme_path"]
    changed = {
        "stage": ZeroStageEnum.weights,
        "sub_group_size": 1e6,
        "offload_param": {"device": OffloadDeviceEnum.nvme, "nvme_path": Path(drive)},
        "offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig(
            device=OffloadDeviceEnum.nvme, nvme_path=drive
        ),
    }
    return {
        **config,
        "data_types": {"grad_accum_dtype": DtypeEnum.bf16},
        "zero_optimization": {**zero, **changed},
    }


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    config = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for name, form in (("json", config), ("python", from_python(config))):
        parsed = DeepSpeedConfig(form)
        assert parsed.memascend == DeepSpeedConfig(config).memascend  # type: ignore[attr-defined]
        request = asdict(PlanRequest.from_deepspeed(form))
        print(f"request {name} {json.dumps(request)}", flush=True)
        engine = build(form, seed=7)
        print(f"run {name} {type(engine.optimizer).__module__}", flush=True)
        train(engine, 0, 3)
        engine.destroy()


if __name__ == "__main__":
    main()
