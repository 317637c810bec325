"""The host memory of a runtime answers the same questions whether it is ours or stock's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from memascend.base.interfaces import Device
from memascend.base.streams import MASTER, PARAMETERS
from memascend.config.block import parse_block
from memascend.resources.host import OwnHost, StockHost
from tests.support.small_runtime import LIGHT
from tests.support.streaming_hosts import HostTensors


def own(folder: Path, limit_bytes: int | None = None) -> OwnHost:
    return OwnHost(
        parse_block(dict(LIGHT)),
        str(folder),
        page_lock=False,
        device=Device(),
        limit_bytes=limit_bytes,
    )


def questions(host: Any) -> set[str]:
    return {name for name in dir(host) if not name.startswith("_")}


def test_both_answer_the_same_questions(tmp_path: Path) -> None:
    assert questions(own(tmp_path)) == questions(StockHost(HostTensors()))


def test_ours_has_an_account(tmp_path: Path) -> None:
    host = own(tmp_path, limit_bytes=1 << 20)
    tensor = host.memory.tensor(4096, torch.uint8, component="slots")
    assert host.components()["slots"].live_bytes == tensor.nbytes
    held_bytes, peak_bytes = host.held_bytes()
    assert 4096 <= held_bytes <= peak_bytes <= 1 << 20
    assert host.unregistered_bytes == 0
    assert host.arena.core is host.checksum_memory
    del tensor
    host.trim()
    assert host.held_bytes()[0] == 0


@pytest.mark.parametrize("lost_bytes", [0, 3, 7, 20])
def test_the_last_streams_lose_what_the_arena_cannot_give_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost_bytes: int
) -> None:
    host = own(tmp_path)

    class Core:
        reserved_bytes, used_bytes = 100 + lost_bytes, 100

        def trim(self) -> None:
            """Nothing can be freed."""

        def stats(self) -> Core:
            return self

    monkeypatch.setattr(host.arena, "core", Core())
    resident = {PARAMETERS: 6, MASTER: 4}
    of_master = max(0, 4 - lost_bytes)
    of_parameters = max(0, 6 - max(0, lost_bytes - 4))
    assert host.reduced(resident) == {PARAMETERS: of_parameters, MASTER: of_master}
    assert resident == {PARAMETERS: 6, MASTER: 4}


def test_stock_has_no_account_and_loses_nothing() -> None:
    memory = HostTensors()
    host = StockHost(memory)
    host.trim()
    assert host.memory is memory
    assert (host.arena, host.checksum_memory, host.unregistered_bytes) == (None, None, 0)
    assert (host.components(), host.held_bytes()) == ({}, (0, 0))
    assert host.reduced({MASTER: 5}) == {MASTER: 5}
    with pytest.raises(AssertionError, match="allocator is off"):
        StockHost(None)
