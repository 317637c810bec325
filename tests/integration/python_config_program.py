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

from memascend import PlanRequest, parse_block
from tests.integration.checkpoint_program import build, train
from tests.support.process_group import leave


def from_python(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration in DeepSpeed's own types, as its tests and many scripts write it."""
    drive = {**config["zero_optimization"]["offload_param"], "device": OffloadDeviceEnum.nvme}
    zero = {
        "stage": ZeroStageEnum.weights,
        "sub_group_size": 1e6,
        "offload_param": drive,
        "offload_optimizer": drive,
    }
    return {
        **config,
        "data_types": {"grad_accum_dtype": "torch.bfloat16"},
        "zero_optimization": {**config["zero_optimization"], **zero},
    }


def in_objects(config: dict[str, Any]) -> dict[str, Any]:
    """Return it with what DeepSpeed reads, but cannot print, so that no engine takes it."""
    drive = config["zero_optimization"]["offload_param"]
    offload = DeepSpeedZeroOffloadOptimizerConfig(**drive)
    param = {**drive, "nvme_path": Path(drive["nvme_path"])}
    return {
        **config,
        "data_types": {"grad_accum_dtype": DtypeEnum.bf16},
        "zero_optimization": {
            **config["zero_optimization"],
            "offload_param": param,
            "offload_optimizer": offload,
        },
    }


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    config = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    python = from_python(config)
    for name, form in (("json", config), ("python", python), ("objects", in_objects(python))):
        assert DeepSpeedConfig(form).memascend == parse_block(config["memascend"])  # type: ignore[attr-defined]
        request = asdict(PlanRequest.from_deepspeed(form))
        print(f"request {name} {json.dumps(request)}", flush=True)
    for name, form in (("json", config), ("python", python)):
        engine = build(form, seed=7)
        print(f"run {name} {type(engine.optimizer).__module__}", flush=True)
        train(engine, 0, 3)
        engine.destroy()
    leave()


if __name__ == "__main__":
    main()
