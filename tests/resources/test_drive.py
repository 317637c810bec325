"""The drive of a runtime answers the same questions whether it is ours or stock's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from memascend.base.streams import GRADIENTS, MASTER, PARAMETERS, STATE
from memascend.config.block import parse_block
from memascend.resources.drive import OwnDrive, StockDrive, stream_of
from memascend.resources.host import StockHost
from memascend.streaming.gradients.stream import GradientStream
from memascend.streaming.optimizer.sub_group import SubGroup
from tests.support.small_runtime import LIGHT, build
from tests.support.streaming_fakes import FakeStore
from tests.support.streaming_hosts import HostTensors

RESIDENT = {PARAMETERS: 1 << 16, MASTER: 1 << 16}


def own(folder: Path) -> OwnDrive:
    return OwnDrive(parse_block(dict(LIGHT)), str(folder), StockHost(HostTensors()))


def questions(kind: Any) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_both_answer_the_same_questions() -> None:
    assert questions(OwnDrive) | {"store"} == questions(StockDrive)


def test_a_grant_is_taken_once_and_keys_keep_their_bytes(tmp_path: Path) -> None:
    drive = own(tmp_path)
    values = torch.arange(1000)
    drive.io.write(key="param.0", source=values).wait()
    drive.grant(RESIDENT)
    assert drive.store.granted == RESIDENT
    drive.make_way(RESIDENT)
    assert drive.store.memory_of(key="param.0") == values.nbytes  # not moved
    drive.make_way({})
    assert drive.store.granted == {}
    found = torch.empty_like(values)
    drive.io.read(key="param.0", target=found).wait()
    assert torch.equal(found, values)
    drive.close()


def test_ours_has_an_account(tmp_path: Path) -> None:
    drive = own(tmp_path)
    drive.io.write(key="a", source=torch.zeros(1 << 12)).wait()
    assert drive.stats()["bytes_written"] > 0
    [volume] = drive.volumes()
    assert volume.bytes_written > 0
    wear = drive.read_wear()
    assert wear is not None
    assert drive.note_step() is None  # there is no budget
    assert "engine threads" in drive.describe()
    drive.close()


def test_stock_has_none_and_keeps_nothing() -> None:
    io = FakeStore()
    drive = StockDrive(io)
    drive.make_way(RESIDENT)
    drive.provide_checksums(5)
    drive.grant(RESIDENT)
    drive.note_checkpoint("/runs/one/global_step7")
    assert drive.io is io
    assert drive.store is None
    assert (drive.stats(), drive.volumes(), drive.read_wear(), drive.note_step()) == (
        {},
        (),
        None,
        None,
    )
    assert "DeepSpeed" in drive.describe()
    drive.close()
    with pytest.raises(AssertionError, match="direct_nvme is off"):
        StockDrive(None).io  # noqa: B018  the access itself is the test


def test_every_key_of_the_paths_has_its_stream(tmp_path: Path) -> None:
    runtime = build(tmp_path)
    assert runtime.store is not None
    gradient_stream = GradientStream(store=runtime.io, slots=runtime.staging)
    with runtime.lock:
        gradient_stream.put("7_9", 0, torch.ones(10))
        runtime.staging.wait_writes()
    assert {stream_of(key) for key in runtime.store.keys()} == {GRADIENTS}  # noqa: SIM118
    group = SubGroup("7_9", 10)
    assert stream_of(group.key()) == MASTER
    assert stream_of(group.key("exp_avg")) == STATE
    assert stream_of("param.17") == PARAMETERS
    assert stream_of("/nvme/optimizer/rank0/param.0.tensor.swp") is None
    runtime.close()


def test_what_is_free_beside_the_volumes_is_told(tmp_path: Path) -> None:
    drive = own(tmp_path)
    free = drive.free_bytes()
    assert free is not None
    assert free == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)
    drive.close()
    assert StockDrive(None).free_bytes() is None
