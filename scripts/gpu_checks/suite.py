"""The tests of the repository that need a device, all of them as one check."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import gpu_lacks

from . import Check, Figures

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tests/kernels", "tests/memory")
#: For tests on the CPU; with them no kernel would run on the device.
OTHER_DEVICES = ("TRITON_INTERPRET", "DS_ACCELERATOR")


def measure_tests(folder: Path, broken: bool) -> dict[str, Any]:
    """Run pytest in a process of its own; return each test's name by its outcome.

    Raises:
        RuntimeError: pytest wrote no report.
    """
    environment = {key: value for key, value in os.environ.items() if key not in OTHER_DEVICES}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    if broken:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    report = folder.absolute() / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *FOLDERS]
    command += ["-p", "no:cacheprovider", f"--junitxml={report}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if not report.exists():
        raise RuntimeError(f"pytest wrote no report:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return outcomes(report)


def outcomes(report: Path) -> dict[str, Any]:
    """Return the tests of pytest's report: names of those that passed, did not, or were skipped."""
    found: dict[str, Any] = {"passed": [], "failed": [], "skipped": []}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {part.tag for part in case}
        if kinds & {"failure", "error"}:
            result = "failed"
        else:
            result = "skipped" if "skipped" in kinds else "passed"
        found[result].append(f"{case.get('classname')}.{case.get('name')}")
    return found


def judge_tests(figures: Figures) -> list[str]:
    """Wants tests that passed, and no others."""
    problems = [f"{name} {result}" for result in ("failed", "skipped") for name in figures[result]]
    return problems if figures["passed"] else [*problems, "no test passed"]


CHECKS = (
    Check(
        "tests",
        f"python -m pytest -m gpu {' '.join(FOLDERS)} passes",
        measure_tests,
        judge_tests,
        "the device is hidden, so that every test is skipped",
        noticed_min=2,
        needs=lambda: gpu_lacks.packages("pytest", "hypothesis") or gpu_lacks.compiler(),
        seconds=40.0,
    ),
)
