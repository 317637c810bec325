"""A configuration in DeepSpeed's own Python types trains as the same one in JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from .programs import REPOSITORY, alone, armed_lines, importing_tests, losses, run

pytestmark = [pytest.mark.deepspeed, pytest.mark.full]

PROGRAM = REPOSITORY / "tests" / "integration" / "python_config_program.py"


def test_enums_dtypes_paths_and_floats_from_python_are_read_as_json_is(tmp_path: Path) -> None:
    drive = {"device": "nvme", "nvme_path": str(tmp_path / "drive")}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 1_000_000,
            "offload_param": drive,
            "offload_optimizer": drive,
        },
        "memascend": {
            "allocator": {"huge_pages": "off", "page_lock": False},
            "direct_nvme": {"engine": "threads"},
        },
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    done = run(
        [str(PROGRAM), str(path)],
        cwd=tmp_path,
        environment=importing_tests() | alone(),
    )
    assert done.returncode == 0, done.stdout[-6000:]
    found = losses(done.stdout)
    assert len(found) == 6
    assert found[:3] == found[3:]
    assert len(armed_lines(done.stdout)) == 2
    requests = re.findall(r"^request \w+ (.*)$", done.stdout, re.MULTILINE)
    assert len(requests) == 3
    assert len(set(requests)) == 1
    modules = re.findall(r"^run \w+ (\S+)$", done.stdout, re.MULTILINE)
    assert modules == ["memascend.deepspeed.optimizer.optimizer"] * 2
