"""Fixtures of every test."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.program import run_program

__all__ = ["run_program"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--some-must-run", action="store_true", help="fail when every test was skipped"
    )


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus != pytest.ExitCode.OK or not session.config.getoption("--some-must-run"):
        return
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    if not reporter.stats.get("passed"):
        reporter.ensure_newline()
        reporter.write_line("every test was skipped; the reasons are above", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


#: Ranks that start look for each other's by name, and wait for ever for one that is gone.
STARTING_S = 30.0


@pytest.fixture(autouse=True)
def _little_shared_memory_left() -> Iterator[None]:
    """DeepSpeed's CPU collectives leave 66 MiB of shared memory per rank behind, for good.

    Ranks that have started have it mapped and do not need its name, whosoever they are.
    """
    yield
    remove_shared_memory(older_than_s=STARTING_S)


@pytest.fixture(autouse=True, scope="session")
def _no_shared_memory_left() -> Iterator[None]:
    """What the last tests left."""
    before = set(shared_memory())
    yield
    for path in set(shared_memory()) - before:
        path.unlink(missing_ok=True)


def shared_memory() -> Iterator[Path]:
    """What DeepSpeed made, of this or of other runs."""
    return Path("/dev/shm").glob("deepspeed_allreduce_buffer_*")


def remove_shared_memory(*, older_than_s: float) -> None:
    now = time.time()
    for path in shared_memory():
        with suppress(OSError):  # another run was faster, or it is another user's
            if now - path.stat().st_ctime > older_than_s:
                path.unlink()
