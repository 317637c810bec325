"""The device kernels compile for GPUs that are not here; only numbers need one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300.0

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (pip install triton)", allow_module_level=True)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of each kernel, in a process that does not interpret them."""
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), environment.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_program"],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_kernel_compiles_to_machine_code(compiled: dict[str, Any]) -> None:
    assert {name: error for name, _, error in compiled["rows"] if error} == {}
    architectures = {name.split(",")[0] for name, _, _ in compiled["rows"]}
    assert architectures == {"sm_80", "sm_90", "sm_100"}


def test_aligned_gradients_are_loaded_by_sixteen_bytes_whatever_their_count(
    compiled: dict[str, Any],
) -> None:
    """Nothing is known of the count, which is not compiled for."""
    scans = {name: loads for name, loads, _ in compiled["rows"] if "finish" not in name}
    narrow = {name for name, loads in scans.items() if loads != "v4"}
    assert narrow == {f"sm_{number}, fp32, not aligned" for number in (80, 90, 100)}


def test_no_number_is_compiled_for_on_its_own(compiled: dict[str, Any]) -> None:
    """Another number of elements would otherwise compile in the middle of backward."""
    pointers = ["source", "found", "partial", "found", "partial", "result"]
    assert compiled["specialised"] == pointers
