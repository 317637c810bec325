"""Fixtures of every test, what is tried by chance, and which tests share a process."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.support import quick_start
from tests.support.browser import browser
from tests.support.program import run_program

__all__ = ["browser", "run_program"]


def search_path_behind(folder: Path) -> str:
    """Return where Python looks for modules, with this folder first."""
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys([str(folder), *filter(None, inherited)]))


# Libraries that take their time for what no test asks about: here, and in whatever tests start.
STAND_INS = Path(__file__).parent / "support" / "stand_ins"
sys.path.insert(0, str(STAND_INS))
os.environ["PYTHONPATH"] = search_path_behind(STAND_INS)
# OpenMP's threads wait for work on a core; there are as many of them as cores in each process.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# "quick" tries the same few examples every time. "full" tries as many as the tests ask for, others
# every time: its seed is printed. See tests/support/examples.py. How long one takes is not tested.
PATIENT: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow],
}
hypothesis.settings.register_profile("quick", max_examples=20, derandomize=True, **PATIENT)
hypothesis.settings.register_profile("full", max_examples=100, print_blob=True, **PATIENT)
hypothesis.settings.load_profile("quick")  # unless --hypothesis-profile names another


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    profile = config.getoption("hypothesis_profile")
    if profile == "full" and config.getoption("hypothesis_seed") is None:
        config.option.hypothesis_seed = str(random.getrandbits(32))
    if hasattr(config, "workerinput") or config.option.dist == "no":  # here tests are run
        os.environ["PYTHONPATH"] = search_path_behind(quick_start.FOLDER)
    # A shell starts what runs in the background with Ctrl-C ignored; tests send it to themselves.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.getoption("hypothesis_seed")
    return None if seed is None else f"--hypothesis-seed={seed}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Have one process run what shares a module's fixtures or a worker group, the longest first."""
    share = config.getoption("--share")
    config.hook.pytest_deselected(items=[item for item in items if not is_of_share(item, share)])
    items[:] = [item for item in items if is_of_share(item, share)]
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group_of(item)))
    items.sort(key=lambda item: _place_of(_group_of(item)))


def pytest_collection_finish() -> None:
    """Thousands of tests and all that they import stay: no later collection looks through them."""
    gc.collect()
    gc.freeze()


def share_named(text: str) -> tuple[int, int]:
    """Read `2/3` as the second of three shares."""
    number, count = (int(part) for part in text.split("/"))
    if not 1 <= number <= count:
        raise ValueError(text)
    return number, count


def is_of_share(item: pytest.Item, share: tuple[int, int]) -> bool:
    """Tell whether a test runs in that share: those of `make test` do in each.

    Tests of one file with the same parameters go together, and all of a file marked `one_run`: many
    look at one run of a program.
    """
    if not item.get_closest_marker("full"):
        return True
    number, count = share
    path, _, name = item.nodeid.partition("::")
    function, _, parameters = name.partition("[")
    key = path if item.get_closest_marker("one_run") else f"{path} {parameters or function}"
    return zlib.crc32(key.encode()) % count == number - 1


def _group_of(item: pytest.Item) -> str:
    """Name the runs of so many ranks, in parity or on the device, which share oracles; or the file.

    What needs root changes the machine, its loop devices for one: never two of these at once.
    """
    if item.get_closest_marker("root"):
        return "root"
    path = item.nodeid.partition("::")[0]
    if not path.startswith(("tests/parity/", "tests/device/")) or path.endswith(
        "test_divisions.py"
    ):
        return path
    values = item.callspec.params if hasattr(item, "callspec") else {}
    case = values["trial"].case if "trial" in values else values.get("case")
    world = values.get("world") or (case.world if case is not None else 1)
    return f"{path.split('/')[1]} {world}"


def _place_of(group: str) -> int:
    """Order by how long it takes: parity, more so of several ranks, then what starts programs.

    What comes last decides for how long one process has nothing to do.
    """
    beginnings = (
        *("parity 2", "device 4", "device 2", "parity 1", "device 1"),
        *(
            "tests/parity/",
            "tests/examples/test_examples.py",
            "tests/integration/",
            "tests/benchmarks/",
            "tests/deepspeed/checkpoint/",
            "tests/test_wheel.py",
            "tests/scripts/",
            "tests/streaming/optimizer/test_stream_ctrl_c.py",
            "tests/nvme/test_store_processes.py",
            "root",
            "tests/",
        ),
    )
    return next(place for place, text in enumerate(beginnings) if group.startswith(text))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--some-must-run", action="store_true", help="fail when every test was skipped"
    )
    parser.addoption(
        "--share",
        type=share_named,
        default="1/1",
        help="of the tests that `make test` leaves out; 2/3 is the second of three shares",
    )
    parser.addoption(
        "--device-seeds",
        default="3",
        help="of random delays on the emulated device, 0 for none: 0,1,2",
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[SHARED_MEMORY_BEFORE] = set(shared_memory())


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    # One of several processes, or started by a test of one: others still run tests.
    if hasattr(session.config, "workerinput") or "PYTEST_XDIST_WORKER" in os.environ:
        return
    if set(shared_memory()) - session.config.stash[SHARED_MEMORY_BEFORE]:
        time.sleep(STARTING_S)  # some may be of ranks that another run starts right now
        remove_shared_memory(older_than_s=STARTING_S)
    if exitstatus != pytest.ExitCode.OK or not session.config.getoption("--some-must-run"):
        return
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    if not reporter.stats.get("passed"):
        reporter.ensure_newline()
        reporter.write_line("every test was skipped; the reasons are above", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


SHARED_MEMORY_BEFORE = pytest.StashKey[set[Path]]()
#: Ranks that start look for each other's by name, and wait for ever for one that is gone.
STARTING_S = 30.0


@pytest.fixture(autouse=True)
def _little_shared_memory_left() -> Iterator[None]:
    """DeepSpeed's CPU collectives leave 66 MiB of shared memory per rank behind, for good.

    Ranks that have started have it mapped and do not need its name, whosoever they are.
    """
    yield
    remove_shared_memory(older_than_s=STARTING_S)


def shared_memory() -> Iterator[Path]:
    """What DeepSpeed made, of this or of other runs."""
    return Path("/dev/shm").glob("deepspeed_allreduce_buffer_*")


def remove_shared_memory(*, older_than_s: float) -> None:
    now = time.time()
    for path in shared_memory():
        with suppress(OSError):  # another run was faster, or it is another user's
            if now - path.stat().st_ctime > older_than_s:
                path.unlink()
