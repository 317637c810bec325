"""Checkpoints: stock's files, stock's meaning, and a drive that shows nothing before and after."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from integration.programs import REPOSITORY, losses, run

pytestmark = [pytest.mark.deepspeed, pytest.mark.slow]

PROGRAM = REPOSITORY / "tests" / "integration" / "checkpoint_program.py"
BLOCK: dict[str, Any] = {"allocator": {"page_lock": False}, "direct_nvme": {"engine": "threads"}}
WORLDS = (1, 2)


def config(drive: Path, block: dict[str, Any] | None, world: int) -> dict[str, Any]:
    on_drive = {"device": "nvme", "nvme_path": str(drive)}
    more = {} if block is None else {"memascend": block}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {**on_drive, "buffer_count": 8, "buffer_size": 2_000_000},
            "offload_optimizer": {**on_drive, "buffer_count": 5},
            "sub_group_size": 1_000_000 // world,  # of a rank's shards: two sub-groups
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 100,
        },
        "aio": {"block_size": 1 << 20},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "steps_per_print": 1_000_000,
        **more,
    }


class Runs:
    """Saves and loads with one backend and world size, in folders of its own."""

    def __init__(self, folder: Path, block: dict[str, Any] | None, world: int) -> None:
        folder.mkdir()
        self.folder, self.world = folder, world
        self.drive, self.checkpoint = folder / "drive", folder / "checkpoint"
        self.drive.mkdir()
        self._config = folder / "config.json"
        self._config.write_text(json.dumps(config(self.drive, block, world)))

    def run(self, action: str, *more: str, checkpoint: Path | None = None) -> str:
        done = self.start(action, *more, checkpoint=checkpoint)
        assert done.returncode == 0, done.stdout[-6000:]
        return done.stdout

    def start(
        self, action: str, *more: str, checkpoint: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
        paths = [str(self._config), str(self.drive), str(checkpoint or self.checkpoint)]
        search_path = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        return run(
            [*launcher, str(self.world), str(PROGRAM), *paths, action, *more],
            cwd=self.folder,
            environment={"PYTHONPATH": os.pathsep.join(filter(None, search_path))},
        )


def offloaded_files(checkpoint: Path) -> dict[str, int]:
    """Names and sizes of the optimizer's files, as DeepSpeed lays them out."""
    root = checkpoint / "here" / "offloaded_tensors"
    return {
        str(path.relative_to(root)): path.stat().st_size
        for path in root.rglob("*")
        if path.is_file()
    }


def masters(output: str, when: str) -> list[tuple[str, str]]:
    return re.findall(rf"^master {when} (\S+) (\w+)$", output, re.MULTILINE)


def visible(output: str, when: str) -> list[str]:
    (names,) = re.findall(rf"^drive {when} (.*)$", output, re.MULTILINE)
    listed: list[str] = json.loads(names)
    return listed


Backends = Callable[[int], tuple[Runs, str, Runs, str]]


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory) -> Backends:
    """Ours and stock's saving run with their outputs, once for each world size."""
    known: dict[int, tuple[Runs, str, Runs, str]] = {}

    def get(world: int) -> tuple[Runs, str, Runs, str]:
        if world not in known:
            folder = tmp_path_factory.mktemp(f"world{world}")
            ours = Runs(folder / "ours", BLOCK, world)
            stock = Runs(folder / "stock", None, world)
            known[world] = (ours, ours.run("save"), stock, stock.run("save"))
        return known[world]

    return get


@pytest.mark.parametrize("world", WORLDS)
def test_a_checkpoint_has_stocks_files_under_stocks_names_and_sizes(
    backends: Backends, world: int
) -> None:
    ours, _, stock, _ = backends(world)
    expected = offloaded_files(stock.checkpoint)
    assert len(expected) == world * 2 * 3  # two sub-groups: weights and two moments
    assert {name.split("/")[0] for name in expected} == {f"rank{r:02}" for r in range(world)}
    assert offloaded_files(ours.checkpoint) == expected


@pytest.mark.parametrize("world", WORLDS)
def test_training_goes_on_after_a_save_as_if_there_had_been_none(
    backends: Backends, world: int
) -> None:
    _, output, _, stock_output = backends(world)
    assert len(losses(output)) == 4
    assert losses(output) == losses(stock_output)


@pytest.mark.parametrize("world", WORLDS)
def test_before_and_after_a_save_the_drive_shows_nothing(backends: Backends, world: int) -> None:
    ours, output, _stock, stock_output = backends(world)
    assert visible(output, "before") == visible(output, "after") == []
    assert visible(stock_output, "after") != []
    assert list(ours.drive.iterdir()) == []


@pytest.mark.parametrize("world", WORLDS)
def test_a_load_restores_the_master_weights_and_trains_on_as_stock(
    backends: Backends, world: int
) -> None:
    ours, saved, stock, _ = backends(world)
    loaded = ours.run("load")
    assert masters(loaded, "loaded") == masters(saved, "saved")
    assert len(masters(saved, "saved")) == 5
    assert visible(loaded, "before") == visible(loaded, "after") == []
    stock_loaded = stock.run("load")
    assert len(losses(loaded)) == 2
    assert losses(loaded) == losses(stock_loaded)


def test_stock_loads_our_checkpoint_and_we_load_stocks(backends: Backends) -> None:
    ours, saved, stock, stock_saved = backends(1)
    by_stock = stock.run("load", checkpoint=ours.checkpoint)
    assert masters(by_stock, "loaded") == masters(saved, "saved")
    by_us = ours.run("load", checkpoint=stock.checkpoint)
    assert masters(by_us, "loaded") == masters(stock_saved, "saved")
    assert losses(by_us) == losses(by_stock)


def test_two_runs_on_one_drive_save_without_touching_each_other(
    backends: Backends, tmp_path: Path
) -> None:
    ours, alone, _, _ = backends(1)
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    checkpoints = [tmp_path / "one", tmp_path / "other"]
    with ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(ours.run, "save", "--meet", str(meeting), checkpoint=checkpoint)
            for checkpoint in checkpoints
        ]
        outputs = [future.result() for future in futures]
    for output, checkpoint in zip(outputs, checkpoints, strict=True):
        assert losses(output) == losses(alone)
        assert masters(output, "saved") == masters(alone, "saved")
        assert offloaded_files(checkpoint) == offloaded_files(ours.checkpoint)
    assert list(ours.drive.iterdir()) == []


def test_a_checkpoint_of_another_shape_is_refused(backends: Backends, tmp_path: Path) -> None:
    ours, *_ = backends(1)
    damaged = tmp_path / "damaged"
    shutil.copytree(ours.checkpoint, damaged)
    # Master weights; a file of moments would not be read, as stock does not read them either.
    name = min(name for name in offloaded_files(damaged) if "exp_avg" not in name)
    path = damaged / "here" / "offloaded_tensors" / name
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4096)
    done = ours.start("load", checkpoint=damaged)
    assert done.returncode != 0
    assert re.search(r"checkpoint file .* has \d+ bytes, the optimizer needs \d+", done.stdout)
