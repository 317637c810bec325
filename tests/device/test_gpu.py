"""The checks of scripts/gpu_smoke.py as tests, where there is a CUDA device."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu_smoke.py"
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(scope="module")
def smoke() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_smoke", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_smoke"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.deepspeed
@pytest.mark.full
@pytest.mark.timeout(3600)
def test_losses_equal_those_of_cpu_offload(smoke: ModuleType, tmp_path: Path) -> None:
    findings = smoke.check_parity(tmp_path)
    assert len(findings) == 2
    assert all(finding.passed for finding in findings), findings


@pytest.mark.gpu
@NEEDS_GPU
def test_tensors_of_a_registered_arena_are_pinned(smoke: ModuleType, tmp_path: Path) -> None:
    findings = smoke.check_pinned(tmp_path)
    assert len(findings) == 2
    assert all(finding.passed for finding in findings), findings


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.deepspeed
def test_a_slot_is_not_reused_before_a_slow_copy_has_passed(
    smoke: ModuleType, tmp_path: Path
) -> None:
    findings = smoke.check_event_order(tmp_path)
    assert len(findings) == 2
    assert all(finding.passed for finding in findings), findings


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.full
def test_copies_from_a_lease_are_as_fast_as_from_pinned_memory(
    smoke: ModuleType, tmp_path: Path
) -> None:
    findings = smoke.check_bandwidth(tmp_path)
    assert len(findings) == 2
    assert all(finding.passed for finding in findings), findings


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
