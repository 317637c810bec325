"""Gradients that tiles consume: the same sums, and nothing of them on the drive."""

from __future__ import annotations

import pytest
import torch

from memascend.errors import GradientGoneError
from memascend.streaming.gradients.bypass import DriveBypass
from tests.support.gradient_streams import GROUP, FlatBuffers, open_gradient_stream, same_bits

NUMEL = 4096


def narrow(seed: int, numel: int = NUMEL) -> torch.Tensor:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    return values.to(torch.bfloat16).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sum_that_goes_to_tiles_is_the_sum_and_only_its_parts_on_the_drive_are_there(
    dtype: torch.dtype,
) -> None:
    gradient_stream, *_ = open_gradient_stream()
    tile_numel, offset, numel = 1024, 300, 5000
    tiles = {begin: torch.full((tile_numel,), 7.0) for begin in range(0, 6144, 2 * tile_numel)}

    def find(begin: int, count: int) -> torch.Tensor | None:
        tile = begin // tile_numel * tile_numel
        assert begin + count <= tile + tile_numel
        return tiles[tile].narrow(0, begin - tile, count) if tile in tiles else None

    bypass = DriveBypass(offset, tile_numel, find)
    flat = FlatBuffers([numel], torch.float32)
    for step in range(3):
        gradient, is_last = narrow(step, numel=numel), step == 2
        flat.put(0, gradient, accumulate=step > 0, final=is_last)
        keywords = {"accumulate": step > 0, "final": is_last, "arrived": dtype}
        shard = gradient_stream.put(
            GROUP, offset, gradient, bypass=bypass if is_last else None, **keywords
        )
    assert shard.squares == pytest.approx(flat.seen.double().square().sum().item())
    bypassed = sorted((begin, count) for begin, count in shard.bypassed)
    assert {begin // tile_numel * tile_numel for begin, _ in bypassed} == set(tiles)
    for begin, count in bypassed:
        part = find(begin, count)
        assert part is not None
        assert torch.equal(part, flat.seen.narrow(0, begin - offset, count))
    # What is not of the gradient is left alone.
    assert torch.equal(tiles[0][:offset], torch.full((offset,), 7.0))
    found = torch.empty(numel)
    with pytest.raises(GradientGoneError, match="cannot read"):
        gradient_stream.get(GROUP, offset, found)
    with pytest.raises(GradientGoneError, match="cannot add"):
        gradient_stream.put(GROUP, offset, gradient, accumulate=True)
    for begin, count in bypassed:
        part = find(begin, count)
        assert part is not None
        gradient_stream.put_back(GROUP, offset, begin, part)
    assert list(gradient_stream.bypassed(GROUP)) == []
    gradient_stream.get(GROUP, offset, found)
    assert same_bits(found, flat.seen)


@pytest.mark.parametrize("arrived", [None, torch.bfloat16])
def test_the_next_window_has_nothing_of_what_went_to_tiles(arrived: torch.dtype | None) -> None:
    gradient_stream, *_ = open_gradient_stream()
    block = torch.empty(NUMEL)
    bypass = DriveBypass(0, NUMEL, lambda begin, count: block.narrow(0, begin, count))
    gradient_stream.put(GROUP, 0, narrow(0), bypass=bypass)
    gradient_stream.put(GROUP, 0, narrow(1), final=False, arrived=arrived)
    assert list(gradient_stream.bypassed(GROUP))  # what the step sees is what it saw before
    gradient_stream.put(GROUP, 0, narrow(2), accumulate=True)
    assert list(gradient_stream.bypassed(GROUP)) == []
    found = torch.empty(NUMEL)
    gradient_stream.get(GROUP, 0, found)
    assert torch.equal(found, narrow(1) + narrow(2))


def test_a_part_is_missing_until_it_is_written_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the write must not leave old bytes of the drive for the gradient."""
    gradient_stream, *_ = open_gradient_stream()
    block = torch.empty(NUMEL)
    bypass = DriveBypass(0, NUMEL, lambda begin, count: block.narrow(0, begin, count))
    shard = gradient_stream.put(GROUP, 0, narrow(0), bypass=bypass)
    (begin, count), *_ = missing = sorted(shard.bypassed)
    part = block.narrow(0, begin, count)

    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gradient_stream._slots, "write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            gradient_stream.put_back(GROUP, 0, begin, part)
    assert sorted(shard.bypassed) == missing
    gradient_stream.put_back(GROUP, 0, begin, part)
    assert sorted(shard.bypassed) == missing[1:]
