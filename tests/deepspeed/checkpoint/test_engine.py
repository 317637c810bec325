"""Checkpoints: stock's files, runs that go on exactly, and nothing of ours in sight.

What is loaded is compared with the run that saved and went on. Most combinations of who saves and
who loads are in tests/parity.
"""

from __future__ import annotations

import hashlib
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

from tests.integration.programs import (
    BLOCK,
    REPOSITORY,
    alone,
    importing_tests,
    losses,
    run,
    training_config,
)
from tests.support.ranks import RANKS

pytestmark = pytest.mark.deepspeed

PROGRAM = REPOSITORY / "tests" / "integration" / "checkpoint_program.py"
WORLDS = (1, pytest.param(2, marks=pytest.mark.full))


class Runs:
    """Saves and loads with one backend and world size, in folders of its own."""

    def __init__(
        self, folder: Path, block: dict[str, Any] | None, world: int, device: str = "nvme"
    ) -> None:
        folder.mkdir()
        self.folder, self.world = folder, world
        self.drive, self.checkpoint = folder / "drive", folder / "checkpoint"
        self.drive.mkdir()
        self._config = folder / "config.json"
        config = training_config(self.drive, block, world)
        for section in ("offload_param", "offload_optimizer"):
            config["zero_optimization"][section]["device"] = device
        self._config.write_text(json.dumps(config))

    def run(self, action: str, *more: str, checkpoint: Path | None = None) -> str:
        done = self.start(action, *more, checkpoint=checkpoint)
        assert done.returncode == 0, done.stdout[-6000:]
        return done.stdout

    def start(
        self, action: str, *more: str, checkpoint: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        paths = [str(self._config), str(self.drive), str(checkpoint or self.checkpoint)]
        return run(
            [*([RANKS, "2"] if self.world == 2 else ()), str(PROGRAM), *paths, action, *more],
            cwd=self.folder,
            environment=importing_tests() | (alone() if self.world == 1 else {}),
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
def test_a_resumed_run_goes_on_as_the_one_that_saved(backends: Backends, world: int) -> None:
    ours, saved, _, _ = backends(world)
    loaded = ours.run("load")
    assert masters(loaded, "loaded") == masters(saved, "saved")
    assert len(masters(saved, "saved")) == 5
    assert visible(loaded, "before") == visible(loaded, "after") == []
    assert len(losses(loaded)) == 2
    assert losses(loaded) == losses(saved)[2:]


@pytest.mark.parametrize("world", WORLDS)
def test_nothing_of_a_save_is_left_beside_the_checkpoint(backends: Backends, world: int) -> None:
    ours, _, _, _ = backends(world)
    names = {path.name for path in ours.checkpoint.iterdir() if path.suffix != ".py"}
    assert names == {"here", "latest"}
    assert (ours.checkpoint / "latest").read_text() == "here"


def test_stock_loads_our_weights_and_we_go_on_with_all_of_stocks(backends: Backends) -> None:
    ours, saved, stock, stock_saved = backends(1)
    by_stock = stock.run("load", checkpoint=ours.checkpoint)
    assert masters(by_stock, "loaded") == masters(saved, "saved")
    by_us = ours.run("load", checkpoint=stock.checkpoint)
    assert masters(by_us, "loaded") == masters(stock_saved, "saved")
    assert losses(by_us) == losses(stock_saved)[2:]
    assert "saved without memascend" in by_us


@pytest.mark.full
def test_the_weights_alone_are_loaded_as_by_cpu_offload(backends: Backends, tmp_path: Path) -> None:
    """Which makes master weights of the 16-bit ones."""
    ours, saved, _, _ = backends(1)
    loaded = ours.run("weights")
    by_stock = Runs(tmp_path / "cpu", None, 1, "cpu").run("weights", checkpoint=ours.checkpoint)
    assert masters(loaded, "loaded") == masters(by_stock, "loaded") != masters(saved, "saved")
    assert losses(loaded) == losses(by_stock)
    assert losses(loaded)[0] == losses(saved)[2]
    assert losses(loaded)[1] != losses(saved)[3]


@pytest.mark.full
def test_a_tag_is_saved_again_and_again(backends: Backends, tmp_path: Path) -> None:
    ours, saved, _, _ = backends(1)
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(ours.checkpoint, checkpoint)
    (checkpoint / "here" / "notes").write_text("mine")
    again = ours.run("save", checkpoint=checkpoint)
    assert losses(again) == losses(saved)
    assert offloaded_files(checkpoint) == offloaded_files(ours.checkpoint)
    assert (checkpoint / "here" / "notes").read_text() == "mine"
    assert losses(ours.run("load", checkpoint=checkpoint)) == losses(saved)[2:]


@pytest.mark.full
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


@pytest.mark.full
def test_a_save_that_is_killed_leaves_the_checkpoint_before_it(
    backends: Backends, tmp_path: Path
) -> None:
    ours, saved, _, _ = backends(2)
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(ours.checkpoint, checkpoint)
    killed = ours.start("killed", checkpoint=checkpoint)
    assert killed.returncode != 0
    assert (checkpoint / ".memascend-here.saving" / "offloaded_tensors").is_dir()
    assert offloaded_files(checkpoint) == offloaded_files(ours.checkpoint)
    assert losses(ours.run("load", checkpoint=checkpoint)) == losses(saved)[2:]
    ours.run("save", checkpoint=checkpoint)
    assert not list(checkpoint.glob(".memascend*"))


@pytest.mark.parametrize("world", WORLDS)
def test_zero_to_fp32_finds_the_master_weights(backends: Backends, world: int) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    ours, saved, _, _ = backends(world)
    weights = get_fp32_state_dict_from_zero_checkpoint(str(ours.checkpoint), tag="here")
    digests = {
        name: hashlib.sha256(weight.contiguous().numpy().tobytes()).hexdigest()
        for name, weight in weights.items()
    }
    assert digests == dict(masters(saved, "saved"))


def damaged_copy(runs: Runs, folder: Path) -> tuple[Path, Path]:
    """A copy of a checkpoint, and a file of moments in it."""
    checkpoint = folder / "damaged"
    shutil.copytree(runs.checkpoint, checkpoint)
    name = max(name for name in offloaded_files(checkpoint) if "exp_avg" in name)
    return checkpoint, checkpoint / "here" / "offloaded_tensors" / name


def truncate(path: Path) -> str:
    os.truncate(path, path.stat().st_size - 4096)
    return rf"{path.name} is damaged: expected \d+ bytes .* found \d+ bytes"


def flip(path: Path) -> str:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    return rf"{path.name} is damaged: expected \d+ bytes with crc32 \w{{8}}, found"


def remove(path: Path) -> str:
    path.unlink()
    return rf"checkpoint file .*{path.name} is missing"


@pytest.mark.full
def test_a_damaged_checkpoint_is_refused_before_anything_changes(
    backends: Backends, tmp_path: Path
) -> None:
    """By one run, one after the other."""
    ours, saved, _, _ = backends(2)
    checkpoints, expected = [], []
    for damage in (truncate, flip, remove):
        folder = tmp_path / damage.__name__
        folder.mkdir()
        checkpoint, path = damaged_copy(ours, folder)  # of the second rank
        checkpoints.append(checkpoint)
        expected.append(damage(path))
    first, *others = checkpoints
    output = ours.run("refused", "--also", *map(str, others), checkpoint=first)
    refusals = [re.findall(rf"refused by rank {rank}: .*", output) for rank in range(2)]
    for by_first, by_second, words in zip(*refusals, expected, strict=True):
        assert "failed on another rank" in by_first
        assert re.search(words, by_second)
    count = len(masters(saved, "saved"))
    before, after = masters(output, "before"), masters(output, "after")
    assert before == after == before[:count] * len(checkpoints)
    assert before[:count] != masters(saved, "saved")


@pytest.mark.full
def test_a_checkpoint_of_stock_with_a_short_file_is_refused(
    backends: Backends, tmp_path: Path
) -> None:
    ours, _, stock, _ = backends(1)
    checkpoint, path = damaged_copy(stock, tmp_path)
    truncate(path)
    output = ours.run("refused", checkpoint=checkpoint)
    assert re.search(r"checkpoint file .* has \d+ bytes, the optimizer needs \d+", output)


@pytest.mark.full
def test_another_number_of_ranks_loads_every_ranks_part(backends: Backends, tmp_path: Path) -> None:
    one, *_ = backends(1)
    two, saved, *_ = backends(2)
    loaded = one.run("load", checkpoint=two.checkpoint)
    assert masters(loaded, "loaded") == masters(saved, "saved")
    assert len(losses(loaded)) == 2
    checkpoint, path = damaged_copy(two, tmp_path)  # of the second rank
    expected = flip(path)
    output = one.run("refused", checkpoint=checkpoint)
    assert re.search(f"refused by rank 0: .*{expected}", output), output[-3000:]
    assert masters(output, "before") == masters(output, "after") != masters(saved, "saved")
