"""The worker groups on the emulated device, shared by every test of the run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.device.emulator import build
from tests.parity.workers import Bench

PROGRAM = "tests.device.worker"


@pytest.fixture(scope="session")
def device_bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    if reason := build.why_not():
        pytest.skip(reason)
    # Here, once: ranks that compiled it while they start would be given up.
    subprocess.run([sys.executable, "-m", build.__name__], cwd=build.ROOT, check=True)
    bench = Bench(tmp_path_factory.mktemp("device"), PROGRAM)
    yield bench
    bench.stop()


@pytest.fixture(scope="session")
def seeds(request: pytest.FixtureRequest) -> list[int]:
    """Of random delays; 0 has none."""
    return [int(seed) for seed in request.config.getoption("device_seeds").split(",")]
