"""Ranks with other blocks or releases are refused by all ranks, and told apart."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("deepspeed")
import torch

from memascend.config.block import parse_block
from memascend.deepspeed.attach import agreement as module
from memascend.errors import ConfigError, MemAscendError, StoreFullError

pytestmark = pytest.mark.deepspeed


class Ranks:
    """Threads that stand for ranks, and what they ask of torch's collectives."""

    class _Own(threading.local):
        rank = 0

    def __init__(self, count: int) -> None:
        self.count = count
        self._own = self._Own()
        self._meeting = threading.Barrier(count, timeout=30)
        self._values: dict[int, torch.Tensor] = {}

    def is_initialized(self) -> bool:
        return True

    def get_world_size(self) -> int:
        return self.count

    def get_rank(self) -> int:
        return self._own.rank

    def broadcast(self, tensor: torch.Tensor, *, src: int) -> None:
        tensor.copy_(self._shared(tensor)[src])

    def all_reduce(self, tensor: torch.Tensor) -> None:
        found = self._shared(tensor)
        tensor.copy_(sum(found[rank] for rank in range(self.count)))

    def _shared(self, tensor: torch.Tensor) -> dict[int, torch.Tensor]:
        self._values[self.get_rank()] = tensor.clone()
        self._meeting.wait()
        found = dict(self._values)
        self._meeting.wait()
        return found

    def check(self, blocks: list[dict[str, Any]]) -> list[str]:
        """Have each rank check its block; return what each was told, "" for nothing."""
        return self.run(lambda rank: module.check_agreement(parse_block(blocks[rank])))

    def run(self, act: Callable[[int], object]) -> list[str]:
        """Have each rank do something; return what each was told, "" for nothing."""
        told = [""] * self.count

        def run(rank: int) -> None:
            self._own.rank = rank
            try:
                act(rank)
            except MemAscendError as error:
                told[rank] = str(error)

        threads = [threading.Thread(target=run, args=[rank]) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return told


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    found = Ranks(3)
    monkeypatch.setattr(module, "dist", found)
    monkeypatch.setattr(module, "_device", lambda: "cpu")
    return found


@pytest.mark.parametrize(
    "last",
    [
        {},
        {"host_memory_limit": "2GiB", "volumes": ["/b"], "status": "/a"},
        {
            "host_memory_limit": "1GiB",
            "heap": {"enabled": False},
            "direct_nvme": {"queue_depth": 2},
        },
    ],
    ids=["same", "its own drives", "its own machine"],
)
def test_what_machines_may_have_for_themselves_is_not_compared(
    ranks: Ranks, last: dict[str, Any]
) -> None:
    first = {"host_memory_limit": "1GiB"} if last else {}
    assert ranks.check([first, first, last]) == [""] * 3


@pytest.mark.parametrize(
    ("last", "told"),
    [
        (
            {"streaming": {"optimizer": {"tile_bytes": "1MiB"}}},
            "memascend.streaming.optimizer.tile_bytes is 1048576 on rank 2 and null on rank 0",
        ),
        ({"host_memory_limit": "1GiB"}, 'memascend.host_memory_limit is "stated" on rank 2'),
        ({"status": False}, 'memascend.status is "off" on rank 2 and "on" on rank 0'),
        ({"verify": "full"}, 'memascend.verify is "full" on rank 2 and "off" on rank 0'),
    ],
)
def test_a_difference_is_refused_by_every_rank(
    ranks: Ranks, last: dict[str, Any], told: str
) -> None:
    *others, found = ranks.check([{}, {}, last])
    assert told in found
    assert "the same DeepSpeed JSON" in found
    assert all(text.startswith("rank(s) 2 differ from rank 0") for text in others)


def test_another_release_is_refused(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = iter(["1.0", "1.0", "1.1"])
    facts = module._facts

    def changed(config: Any) -> dict[str, Any]:
        return facts(config) | {"the release of torch": next(versions)}

    monkeypatch.setattr(module, "_facts", changed)
    assert sum("the release of torch is" in text for text in ranks.check([{}] * 3)) >= 1


@pytest.mark.parametrize("failing", [[], [1], [0, 2]])
def test_where_one_rank_fails_all_do(ranks: Ranks, failing: list[int]) -> None:
    def begin(rank: int) -> None:
        with module.all_or_none(StoreFullError):
            if rank in failing:
                raise ConfigError("the drive is full")

    for rank, told in enumerate(ranks.run(begin)):
        if rank in failing:
            assert "the drive is full" in told
        else:
            assert told == ("rank(s) " + ", ".join(map(str, failing)) if failing else "")


def test_a_rank_alone_has_nobody_to_agree_with(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.count = 1
    monkeypatch.setattr(module, "_text_of_rank_0", None)
    module.check_agreement(parse_block({}))
    with module.all_or_none(StoreFullError):
        pass
    with pytest.raises(ConfigError, match="wrong"), module.all_or_none(StoreFullError):
        raise ConfigError("wrong")
