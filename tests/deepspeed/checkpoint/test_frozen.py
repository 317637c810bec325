"""Parts of frozen parameters, divided between other ranks than saved them."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memascend.checkpoint.torch_file import StreamedTensor
from memascend.deepspeed.checkpoint import frozen
from memascend.errors import StoreError
from memascend.streaming.optimizer.step import Step
from tests.support.streaming_hosts import memory_store, staging_slots

pytestmark = pytest.mark.deepspeed

BF16 = torch.bfloat16
NUMEL = 10_007


def divided(values: torch.Tensor, world: int) -> list[torch.Tensor]:
    """The parts of ranks, the last one padded, as DeepSpeed divides a parameter."""
    part_numel = -(-values.numel() // world)
    padded = torch.zeros(part_numel * world, dtype=values.dtype)
    padded[: values.numel()] = values
    return list(padded.split(part_numel))


class Swapper:
    def key(self, param: Any) -> str:
        return str(param.key)


def engine_of(
    rank: int,
    world: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_local: bool = False,
    dtype: torch.dtype = BF16,
) -> Any:
    """An engine of one frozen parameter, and its store."""
    part_numel = -(-NUMEL // world)
    shard = SimpleNamespace(ds_numel=part_numel, final_location="nvme", dtype=dtype)
    # Of another dtype, as of a module that was cast while it was partitioned.
    param = SimpleNamespace(ds_numel=NUMEL, ds_tensor=shard, dtype=torch.float64, key="param.0")
    swapper = Swapper()
    monkeypatch.setattr(frozen, "swapper_of", lambda param: swapper)
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda group=None: rank)
    store = memory_store()
    store.reserve(key="param.0", nbytes=part_numel * dtype.itemsize)
    runtime = SimpleNamespace(staging=staging_slots(store), lock=nullcontext())
    upstream = SimpleNamespace(process_group=None, partition_parameters=lambda: None)
    optimizer = SimpleNamespace(
        attachment=SimpleNamespace(runtime=runtime),
        upstream=upstream,
        steps=SimpleNamespace(current=(step := Step()), mend=step.mend),
    )
    return SimpleNamespace(
        optimizer=optimizer,
        store=store,
        numel=part_numel,
        use_node_local_storage=lambda: is_local,
        _get_zero_frozen_param_attributes=lambda function: {"base": function(param)},
    )


def save(folder: Path, parts: list[torch.Tensor]) -> list[Path]:
    files = [folder / f"{rank}.pt" for rank in range(len(parts))]
    for path, part in zip(files, parts, strict=True):
        torch.save({"frozen_param_fragments": {"base": part.clone()}}, path)
    return files


@pytest.mark.parametrize("saved_world", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_any_number_of_ranks_takes_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_world: int, world: int
) -> None:
    values = torch.randn(NUMEL).to(BF16)
    files = save(tmp_path, divided(values, saved_world))
    for rank, expected in enumerate(divided(values, world)):
        engine = engine_of(rank, world, monkeypatch)
        frozen._restore(engine, frozen.frozen_parameters(engine), files)
        found = torch.empty(engine.numel, dtype=BF16)
        engine.store.read(key="param.0", target=found).wait()
        assert torch.equal(found, expected)


def test_half_of_a_load_is_half_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(NUMEL).to(BF16)
    files, engine = save(tmp_path, [values]), engine_of(0, 1, monkeypatch)
    every, step = frozen.frozen_parameters(engine), engine.optimizer.steps.current
    with monkeypatch.context() as patch:
        patch.setattr(frozen, "_fill", fail)
        with pytest.raises(StoreError):
            frozen._restore(engine, every, files)
    assert step.is_mixed
    frozen._restore(engine, every, files)
    assert not step.is_mixed


def fail(*_: object) -> None:
    raise StoreError(5, "the drive failed")


@pytest.mark.parametrize("kind", ["uint8", "int64", "bool", "float8_e4m3fn", "complex64"])
def test_parts_may_be_of_any_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    dtype = getattr(torch, kind)
    values = (torch.arange(NUMEL) % 100).float().to(dtype)
    files = save(tmp_path, divided(values, 2))
    for rank, expected in enumerate(divided(values, 3)):
        engine = engine_of(rank, 3, monkeypatch, dtype=dtype)
        every = frozen.frozen_parameters(engine)
        frozen._restore(engine, every, files)
        content: dict[str, Any] = {"frozen_param_fragments": {"base": torch.zeros(())}}
        frozen.put_in(content, every, engine.optimizer.attachment.runtime.staging)
        written = bytearray()
        content["frozen_param_fragments"]["base"].write(written.extend)
        assert written == expected.view(torch.uint8).numpy().tobytes()


def test_small_ones_in_host_memory_are_saved_and_loaded_beside_those_on_the_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed has the values of small ones; where it loads nothing they are ours to load."""
    engine = engine_of(1, 2, monkeypatch)
    values = torch.randn(11).to(BF16)
    shard = torch.zeros(6, dtype=BF16)
    shard.ds_numel, shard.final_location = 6, None  # type: ignore[attr-defined]
    small = SimpleNamespace(ds_numel=11, ds_tensor=shard, dtype=BF16)
    every = frozen.frozen_parameters(engine) | {"small": small}
    engine._get_zero_frozen_param_attributes = lambda function: {
        name: function(param) for name, param in every.items()
    }
    assert frozen.frozen_parameters(engine) == every
    given = torch.ones(3)
    content = {"frozen_param_fragments": {"base": torch.zeros(()), "small": given}}
    frozen.put_in(content, every, engine.optimizer.attachment.runtime.staging)
    assert content["frozen_param_fragments"]["small"] is given
    parts = zip(divided(torch.randn(NUMEL).to(BF16), 2), divided(values, 2), strict=True)
    files = [tmp_path / "0.pt", tmp_path / "1.pt"]
    for path, (base, part) in zip(files, parts, strict=True):
        torch.save({"frozen_param_fragments": {"base": base.clone(), "small": part.clone()}}, path)
    frozen._restore(engine, every, files)
    assert torch.equal(shard, divided(values, 2)[1])


def test_where_each_rank_has_a_folder_its_own_part_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = divided(torch.randn(NUMEL).to(BF16), 2)
    engine = engine_of(1, 2, monkeypatch, is_local=True)
    frozen._restore(engine, frozen.frozen_parameters(engine), save(tmp_path, parts)[1:])
    found = torch.empty(engine.numel, dtype=BF16)
    engine.store.read(key="param.0", target=found).wait()
    assert torch.equal(found, parts[1])


@pytest.mark.parametrize("part", [torch.zeros(()), torch.zeros(1), torch.zeros(NUMEL // 2)])
def test_placeholders_are_no_values(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    part: torch.Tensor,
) -> None:
    engine = engine_of(0, 1, monkeypatch)
    values = torch.randn(NUMEL).to(BF16)
    engine.store.write(key="param.0", source=values).wait()
    with caplog.at_level(logging.WARNING, "memascend"):
        frozen._restore(engine, frozen.frozen_parameters(engine), save(tmp_path, [part]))
    assert "1 of 1 frozen parameters (base)" in caplog.text
    found = torch.empty(NUMEL, dtype=BF16)
    engine.store.read(key="param.0", target=found).wait()
    assert torch.equal(found, values)


def test_what_is_saved_streams_from_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(0, 1, monkeypatch)
    values = torch.randn(NUMEL).to(BF16)
    engine.store.write(key="param.0", source=values).wait()
    content: dict[str, Any] = {"frozen_param_fragments": {"base": torch.zeros(1)}}
    slots = engine.optimizer.attachment.runtime.staging
    assert frozen.put_in(content, frozen.frozen_parameters(engine), slots) == 2 * NUMEL
    streamed = content["frozen_param_fragments"]["base"]
    assert isinstance(streamed, StreamedTensor)
    written = bytearray()
    streamed.write(lambda piece: written.extend(memoryview(piece)))
    assert written == values.view(torch.uint8).numpy().tobytes()


def test_where_they_are_left_out_or_elsewhere_nothing_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of(0, 1, monkeypatch)
    slots = engine.optimizer.attachment.runtime.staging
    assert (
        frozen.put_in({"frozen_param_fragments": None}, frozen.frozen_parameters(engine), slots)
        == 0
    )
    monkeypatch.setattr(frozen, "swapper_of", lambda param: None)
    content = {"frozen_param_fragments": {"base": torch.zeros(1)}}
    assert frozen.put_in(content, frozen.frozen_parameters(engine), slots) == 0
    assert torch.equal(content["frozen_param_fragments"]["base"], torch.zeros(1))
