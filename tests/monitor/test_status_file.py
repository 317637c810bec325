"""A rank's file is written now and then, says what there is to say, and never disturbs training."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from memascend.ledger.ledger import Ledger
from memascend.monitor import status_file as module
from memascend.monitor.clock import BACKWARD, FORWARD, STEPS_AVERAGED
from memascend.monitor.status import Status, VolumeRate, read_status
from memascend.monitor.status_file import INTERVAL_S, Progress, RankPlace, StatusFile
from tests.support.statuses import RUN, ledger


class Rank:
    """A rank whose seconds pass when a test says so."""

    def __init__(self, root: Path, *, is_shared: bool = True, number: int = 1) -> None:
        self.now = 100.0
        self.read_count = 0
        self.drive = {"wait_seconds": 0.0, "bytes_read": 0, "bytes_written": 0}
        self.ledger: Callable[[], Ledger] = ledger
        self.place = RankPlace(root, is_shared, RUN, number, world_size=2, program="train.py")
        self.file = StatusFile(
            self.place, self._read, read_drive=lambda: self.drive, clock=lambda: self.now
        )

    def _read(self) -> Ledger:
        self.read_count += 1
        return self.ledger()

    @property
    def status(self) -> Status:
        return read_status(self.place.path)

    def step(self, number: int, *, tokens: int = 0) -> None:
        """Forward takes two seconds, and so does backward."""
        self.file.begin_forward(after_backward=False, count_tokens=lambda: tokens)
        self.now += 2
        self.file.end_forward()
        self.now += 2
        self.file.begin_step()
        self.file.end_step(lambda: Progress(step=number, steps_total=10, samples=8))


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path / "root")


def test_before_the_first_step_there_is_no_file(rank: Rank) -> None:
    rank.file.finish()
    assert not rank.place.root.exists()


def test_a_step_is_told_with_its_times_and_rates(rank: Rank) -> None:
    rank.step(1)
    rank.step(2, tokens=400)
    rank.now += INTERVAL_S
    rank.file.begin_forward(after_backward=True, count_tokens=lambda: 0)
    found = rank.status
    assert (found.run, found.rank, found.world_size, found.program) == (RUN, 1, 2, "train.py")
    assert (found.step, found.steps_total, found.phase) == (2, 10, FORWARD)
    assert found.mean is not None
    assert (found.mean.forward, found.mean.backward) == (2, 2)
    assert found.samples_per_second == 2
    assert found.tokens_per_second == 100
    assert found.process.pid == os.getpid()
    assert found.ledger.held_bytes == ledger().held_bytes


def test_without_tokens_there_is_no_rate_of_them(rank: Rank) -> None:
    rank.step(1)
    rank.now += INTERVAL_S
    rank.file.end_forward()
    assert rank.status.samples_per_second == 2
    assert rank.status.tokens_per_second is None


def test_of_many_phases_in_a_second_one_is_written(rank: Rank) -> None:
    for _ in range(100):
        rank.file.begin_forward(after_backward=False, count_tokens=lambda: 0)
        rank.file.end_forward()
        rank.now += INTERVAL_S / 200
    assert rank.read_count == 1
    rank.now += INTERVAL_S
    rank.file.end_forward()
    assert rank.read_count == 2
    assert rank.status.phase == BACKWARD


def test_rates_of_the_drives_are_those_since_the_file_before(rank: Rank) -> None:
    rank.file.begin_forward(after_backward=False, count_tokens=lambda: 0)
    assert rank.status.rates == []
    (volume,) = ledger().volumes
    later = replace(volume, bytes_read=volume.bytes_read + 1000)
    rank.ledger = lambda: ledger(volumes=(later,))
    rank.now += 4
    rank.file.end_forward()
    assert rank.status.rates == [VolumeRate("/mnt/ssd", 250, 0, 0)]
    rank.file.finish()
    assert rank.status.rates == [VolumeRate("/mnt/ssd", 250, 0, 0)]


def test_waiting_for_the_drives_is_that_of_the_step(rank: Rank) -> None:
    rank.drive = {"wait_seconds": 5.0}  # while the model was built
    rank.step(1)
    rank.drive = {"wait_seconds": 5.5}
    rank.step(2)
    rank.file.finish()
    assert rank.status.last is not None
    assert rank.status.last.waited == 0.5


def test_the_end_is_said_whatever_the_time(rank: Rank) -> None:
    rank.step(1)
    rank.file.finish()
    assert rank.status.is_finished
    assert rank.status.step == 1


def test_a_forked_child_does_not_say_that_its_parent_is_through(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.step(1)
    monkeypatch.setattr(module.os, "getpid", lambda: 1)
    rank.file.finish()
    assert not rank.status.is_finished


def test_the_last_step_is_known_in_numbers(rank: Rank) -> None:
    assert rank.file.last_step() == {}
    rank.drive = {"wait_seconds": 1.0, "bytes_read": 1000, "bytes_written": 500}
    rank.step(1)
    rank.drive = {"wait_seconds": 1.5, "bytes_read": 4000, "bytes_written": 700}
    rank.step(2, tokens=400)
    assert rank.file.last_step() == {
        "step_seconds": 4,
        "forward_seconds": 2,
        "backward_seconds": 2,
        "optimizer_seconds": 0,
        "other_seconds": 0,
        "waited_seconds": 0.5,
        "tokens_per_second": 100,
        "host_memory_bytes": ledger().held_bytes,
        "resident_memory_bytes": ledger().resident_bytes,
        "bytes_read": 3000,
        "bytes_written": 200,
    }


@pytest.mark.parametrize("number", [0, 1])
def test_rank_0_says_once_what_the_drives_have_to_do_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    caplog.set_level(logging.INFO, logger="memascend")
    rank = Rank(tmp_path, number=number)
    (volume,) = ledger().volumes
    busy_from = rank.now + 4
    rank.ledger = lambda: ledger(volumes=(replace(volume, busy_s=0.95 * (rank.now - busy_from)),))
    for step in range(3 * STEPS_AVERAGED):
        rank.step(step)
    lines = [line for line in caplog.messages if "bottleneck" in line]
    assert len(lines) == (number == 0)
    assert all("4.00 s /mnt/ssd was busy for 95 % of the time" in line for line in lines)


# -- what fails ----------------------------------------------------------------------------------


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_folder_that_cannot_be_made_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    rank = Rank(tmp_path / "file" / "root")
    for number in range(3):
        rank.step(number)
    rank.file.finish()
    (warning,) = warnings(caplog)
    assert str(rank.place.path.parent) in warning
    assert '"status" in the block' in warning


def test_a_folder_of_another_user_in_tmp_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "theirs"
    root.mkdir()
    root.chmod(0o777)
    (root / RUN).mkdir()  # guessed
    rank = Rank(root, is_shared=False)
    for number in range(3):
        rank.step(number)
    rank.file.finish()
    assert list((root / RUN).iterdir()) == []
    assert "not a folder of this user alone" in warnings(caplog)[0]


def test_a_full_drive_is_one_warning_and_the_next_try_counts(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rank.step(1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "replace_whole", full)
        for number in (2, 3):
            rank.step(number)
    assert len(warnings(caplog)) == 1
    assert "No space left on device" in warnings(caplog)[0]
    rank.step(4)
    rank.file.finish()
    assert rank.status.step == 4


def test_an_account_that_cannot_be_had_is_one_warning(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> Ledger:
        raise RuntimeError("the store is closed")

    rank.ledger = fail
    with caplog.at_level(logging.WARNING):
        rank.step(1)
        rank.step(2)
    assert len(warnings(caplog)) == 1
