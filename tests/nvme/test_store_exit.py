"""A program that ends while its drive is silent: it ends, and says which drive."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from memascend.errors import StoreError
from memascend.nvme.store import MemoryFaults
from tests.support.store_programs import start
from tests.support.streaming_hosts import memory_store

PROGRAM = """
import torch
from memascend.nvme.store import MemoryFaults
from memascend.streaming.background import BackgroundStep
from tests.support.activation_streams import activation_stream, numbers
from tests.support.streaming_hosts import memory_store

WATCHDOG_SECONDS = 0.2
values = torch.zeros(1024)
faults = MemoryFaults()
store = memory_store(faults, watchdog_seconds=WATCHDOG_SECONDS)
store.reserve(key="weights", nbytes=values.nbytes)
faults.paused = True
"""
#: What waits for the drive while the program ends.
WAITING = {
    "the store": "store.write(key='weights', source=values)",
    "the walk": """
walk = BackgroundStep()
step = lambda reach: store.write(key="weights", source=values).wait()
walk.start([step], {}, store.core.wait_all)
""",
    "activations": """
stream = activation_stream(faults, watchdog_seconds=WATCHDOG_SECONDS)
saved = [stream.put(numbers(seed)) for seed in range(2)]
""",
}


def test_a_program_ends_though_its_drive_is_silent(tmp_path: Path) -> None:
    program = start(tmp_path, PROGRAM + "".join(WAITING.values()))
    _, text = program.communicate(timeout=60)
    assert program.returncode == 0, text
    for key in ("weights", "activation.0"):
        assert f'no answer from the device for 0.2 s: write of "{key}"' in text
        assert f'StoreError: [Errno 110] cannot write "{key}" in ' in text
    assert "did not answer in time\nfix: check it" in text


def test_a_store_may_be_opened_while_the_program_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't register atexit after shutdown")

    monkeypatch.setattr("memascend.nvme.store._BEFORE_THREADS_END", refuse)
    faults = MemoryFaults()
    store = memory_store(faults, watchdog_seconds=0.05)
    faults.paused = True
    ticket = store.write(key="k", source=torch.zeros(4096))
    with pytest.raises(StoreError, match="did not answer in time"):
        ticket.wait()
    faults.paused = False
    while not ticket.done():  # as often as its test's timeout allows
        time.sleep(0.01)
    store.close()


@pytest.mark.full
@pytest.mark.parametrize("waiting", WAITING.values(), ids=WAITING)
def test_each_by_itself(waiting: str, tmp_path: Path) -> None:
    program = start(tmp_path, PROGRAM + waiting)
    _, text = program.communicate(timeout=60)
    assert program.returncode == 0, text
    assert "StoreError: [Errno 110] cannot write" in text
