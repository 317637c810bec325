"""Wear: what was written per step, what that leaves, and when to say so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from memascend.base.units import GIB
from memascend.config.block import parse_block
from memascend.errors import ConfigError, WriteBudgetError
from memascend.ledger.wear import WearMeter

TB = 10**12


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def meter(**options: Any) -> tuple[WearMeter, Clock]:
    clock = Clock()
    return WearMeter(clock=clock, **options), clock


def test_a_step_is_what_steps_write_and_not_the_first_writing() -> None:
    found, clock = meter(ranks=2)
    for written in (10 * GIB, 11 * GIB, 12 * GIB):  # 9 of them before the first step
        found.note_step(written)
        clock.seconds += 60
    wear = found.read(12 * GIB)
    assert wear.written_bytes == 24 * GIB
    assert wear.step_bytes == 2 * GIB
    assert wear.steps == 3
    assert "2.00 GiB in each of 3 steps" in wear.describe()


def test_the_days_that_an_endurance_leaves() -> None:
    found, clock = meter(endurance_bytes=100 * TB)
    found.note_step(TB)
    clock.seconds += 86_400 / 2
    found.note_step(2 * TB)
    wear = found.read(2 * TB)
    assert wear.endurance_share == pytest.approx(0.02)
    assert wear.days_left == pytest.approx(98 / 2)
    assert "49 days are left" in wear.describe()


def test_nothing_is_guessed_before_the_second_step() -> None:
    found, _ = meter(endurance_bytes=TB)
    assert found.read(0).days_left is None
    found.note_step(5)
    wear = found.read(5)
    assert (wear.days_left, wear.step_bytes) == (None, 0)
    assert wear.describe().startswith("written to the drive: 5 B")


def test_a_budget_is_told_once() -> None:
    found, _ = meter(budget_bytes=100)
    assert found.note_step(100) is None
    wear = found.note_step(101)
    assert wear is not None
    assert wear.is_over_budget
    assert found.note_step(500) is None
    assert found.read(500).is_over_budget


def test_a_drive_that_is_written_up_has_no_days_left() -> None:
    found, clock = meter(endurance_bytes=10)
    found.note_step(5)
    clock.seconds += 1
    found.note_step(20)
    assert found.read(20).days_left == 0


def test_sizes_are_read_with_their_units() -> None:
    section = parse_block({"wear": {"endurance": "600TB", "write_budget": "20 TB"}}).wear
    assert (section.endurance, section.write_budget) == (600 * TB, 20 * TB)
    assert section.over_budget == "warn"


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"endurence": 5}, ["memascend.wear.endurence", "'endurance'"]),
        ({"endurance": "many"}, ["memascend.wear.endurance", "'many'"]),
        ({"write_budget": 0}, ["memascend.wear.write_budget", "at least 1"]),
        ({"over_budget": "halt"}, ["memascend.wear.over_budget", '"halt"', "stop"]),
    ],
)
def test_mistakes_are_named(block: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_block({"wear": block})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize("over_budget", ["warn", "stop"])
def test_every_rank_stops_with_the_first_that_is_over(
    over_budget: str, here: bool, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepspeed")
    import torch

    from memascend.deepspeed.attach.attachment import Attachment
    from memascend.deepspeed.checkpoint import engine as checkpoint

    found, _ = meter(budget_bytes=10)
    runtime = SimpleNamespace(
        config=parse_block({"wear": {"write_budget": 10, "over_budget": over_budget}}),
        read_wear=lambda: found.read(11 if here else 9),
    )
    attachment = SimpleNamespace(runtime=runtime)
    attachment.is_to_stop = lambda: Attachment.is_to_stop(attachment)  # type: ignore[arg-type]
    monkeypatch.setattr(
        checkpoint.dist, "all_reduce", lambda flag, op: flag.fill_(bool(flag.item()) or elsewhere)
    )
    arguments: Any = (
        SimpleNamespace(device=torch.device("cpu")),
        SimpleNamespace(attachment=attachment),
        SimpleNamespace(target="/checkpoints/here"),
    )
    if elsewhere or (here and over_budget == "stop"):
        with pytest.raises(WriteBudgetError, match="/checkpoints/here is complete") as caught:
            checkpoint._stop_over_budget(*arguments)
        assert ("exceeded on another machine" in str(caught.value)) != here
    else:
        checkpoint._stop_over_budget(*arguments)
