"""The checks of scripts/gpu_smoke.sh as tests, where there is a CUDA device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.scripts import SCRIPTS, load_script

QUICK = ("refusals", "kernels", "slots", "staging", "tiles")
ALL = tuple(load_script("gpu_smoke").CHECKS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name not in QUICK)) for name in ALL]
)
def test_a_check_passes_and_its_control_is_noticed(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "gpu_smoke.py"), name, "--minutes", "50"]
    command += ["--out", str(tmp_path / "out"), "--nvme-path", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
