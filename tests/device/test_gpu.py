"""The checks of scripts/gpu_smoke.py as tests, where there is a CUDA device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.scripts import SCRIPTS, load_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = SCRIPTS / "gpu_smoke.py"
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(scope="module")
def smoke() -> ModuleType:
    return load_script("gpu_smoke")


def assert_both_passed(findings: list[Any]) -> None:
    assert [finding.passed for finding in findings] == [True, True], findings


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.deepspeed
@pytest.mark.full
@pytest.mark.timeout(3600)
def test_losses_equal_those_of_cpu_offload(smoke: ModuleType, tmp_path: Path) -> None:
    assert_both_passed(smoke.check_parity(tmp_path))


@pytest.mark.gpu
@NEEDS_GPU
def test_tensors_of_a_registered_arena_are_pinned(smoke: ModuleType, tmp_path: Path) -> None:
    assert_both_passed(smoke.check_pinned(tmp_path))


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.deepspeed
def test_a_slot_is_not_reused_before_a_slow_copy_has_passed(
    smoke: ModuleType, tmp_path: Path
) -> None:
    assert_both_passed(smoke.check_event_order(tmp_path))


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.full
def test_copies_from_a_lease_are_as_fast_as_from_pinned_memory(
    smoke: ModuleType, tmp_path: Path
) -> None:
    assert_both_passed(smoke.check_bandwidth(tmp_path))


def test_without_a_device_the_script_says_so_and_ends_with_77() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 77, done.stderr
    assert "no CUDA device" in done.stderr
