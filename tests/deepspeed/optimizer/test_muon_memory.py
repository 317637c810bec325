"""Muon's updates on a device that has too little memory for two matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from tests.support.muon_rank import (
    NUMEL,
    Rank,
    plain_updates,
    with_streams,
)


@pytest.fixture(autouse=True)
def plain_update(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """No kernels are compiled."""
    return plain_updates(monkeypatch)


def failing(monkeypatch: pytest.MonkeyPatch, *calls: int) -> list[int]:
    """Have calls of Muon's function, of these numbers, overwrite momentum and run out of memory."""
    from deepspeed.runtime.zero.muon import original_muon

    update, made = original_muon.muon_update, list[int]()

    def fail(gradient: torch.Tensor, momentum: torch.Tensor, **options: Any) -> torch.Tensor:
        made.append(len(made))
        found = update(gradient, momentum, **options)
        if made[-1] in calls:
            raise torch.OutOfMemoryError("none left")
        return found

    monkeypatch.setattr(original_muon, "muon_update", fail)
    return made


@pytest.mark.parametrize("applies", [False, True])
def test_an_update_that_has_no_memory_beside_the_next_matrix_is_made_again_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, applies: bool
) -> None:
    """With one rank: else a step would end half-way, with momentum moved on."""
    tight, wide = (Rank(device=with_streams([]), applies=applies) for _ in range(2))
    tight.on_device.room_bytes = 4 * NUMEL
    wide.step(0, 0, 1), wide.step(1, 0, 1)
    made = failing(monkeypatch, 2)
    tight.step(0, 0, 1)
    assert tight.on_device.bytes_peak == 4 * NUMEL
    tight.step(1, 0, 1)
    assert len(made) == 5
    assert "for a second matrix of Muon" in caplog.text
    assert tight.updates._is_applied is applies
    for number in range(2):
        assert torch.equal(tight.weights(number), wide.weights(number))
    for rank in (tight, wide):
        if applies:  # updates are made again, of the momentum before
            rank.step(2, is_skipped=True)
    for number in range(2):
        for found, other in zip(tight.read(number), wide.read(number), strict=True):
            assert torch.equal(found, other)


@pytest.mark.parametrize(("room_bytes", "ranks"), [(0, 1), (4 * NUMEL, 2)])
def test_an_update_is_not_made_again_where_that_does_not_help(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room_bytes: int, ranks: int
) -> None:
    """No matrix was read ahead, or the other ranks wait in the next gather.

    These read none ahead from then on: a checkpoint that is loaded again may get past it.
    """
    rank = Rank(device=with_streams([]))
    rank.on_device.room_bytes = room_bytes
    monkeypatch.setattr("memascend.deepspeed.optimizer.muon._rank_count", lambda: ranks)
    made = failing(monkeypatch, 0)
    with pytest.raises(torch.OutOfMemoryError):
        rank.step(0, 0, 1)
    assert made == [0]
    assert ("second matrix" in caplog.text) == (ranks > 1)
