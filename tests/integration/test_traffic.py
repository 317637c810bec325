"""What the plan says that a step moves is what it moves.

A gather that DeepSpeed prefetches begins at once if the drive has read its shard by then. So it is
a matter of time how far gathers and reads are where a pass turns round, and which shards still have
their slots there. Bytes are compared where nothing is gathered ahead; where something is, bounds
are tested that hold whenever a shard arrives.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memascend.base.streams import PARAMETERS
from tests.support.program import RunProgram

PROGRAM = Path(__file__).with_name("traffic_program.py")
TIMEOUT_S = 1500.0  # a busy machine takes five times as long as one with nothing else to do
TRAININGS = [
    (),
    ("--recomputes",),
    ("--recomputes", "--reuse-distance", "25000000"),
    ("--recomputes", "--accumulation", "4"),
    ("--no-limit",),
    ("--no-limit", "--recomputes", "--accumulation", "8", "--sum-dtype", "fp32"),
    ("--recomputes", "--accumulation", "8", "--sum-dtype", "fp32"),
    ("--recomputes", "--state-dtype", "bf16"),
    ("--no-limit", "--recomputes", "--state-dtype", "int8"),
    ("--recomputes", "--state-dtype", "int8", "--master-dtype", "bf16+8", "--during-backward"),
    ("--recomputes", "--during-backward", "--limit", "165MiB"),
    ("--recomputes", "--during-backward", "--accumulation", "4", "--sum-dtype", "fp32"),
]
#: Of Muon, bytes of each element that a step reads and writes.
MUONS = {
    ("--recomputes", "--muon", "--client"): (12.0, 8.0),  # which the JSON does not name
    ("--recomputes", "--muon", "--clipping", "1e9"): (14.0, 10.0),
    # Slots for two matrices here, too.
    # One tile of four is left, and its updates are moved.
    ("--recomputes", "--muon", "--during-backward"): (10.6, 6.6),
    ("--recomputes", "--muon", "--state-dtype", "int8", "--limit", "48MiB"): (13.1, 9.0),
}
TRAININGS += MUONS
#: Layers of three matrices compute a batch in so many slices; slots have room for two matrices.
SLICES = (1, 4, 8, 16)


def sliced(count: int) -> tuple[str, ...]:
    layers = ("--recomputes", "--matrices", "3", "--sequences", "16")
    return (*layers, "--slices", str(count))


TRAININGS += [sliced(count) for count in SLICES]
#: Likewise, gathered ahead.
AHEAD = [
    (*options, "--prefetch", "1")
    for options in (
        (),
        ("--no-limit",),
        ("--no-limit", "--recomputes", "--accumulation", "4"),
        ("--recomputes", "--during-backward", "--accumulation", "4", "--sum-dtype", "fp32"),
        sliced(1),
        sliced(8),
    )
]

pytestmark = [
    *(pytest.mark.deepspeed, pytest.mark.full, pytest.mark.one_run),
    pytest.mark.timeout(TIMEOUT_S),
]


@pytest.fixture(scope="module")
def moved(run_program: RunProgram) -> dict[tuple[str, ...], dict[str, Any]]:
    """Return what one process has found in all trainings, one behind the other."""
    trainings = TRAININGS + AHEAD
    found = run_program(str(PROGRAM), json.dumps(trainings), timeout_s=TIMEOUT_S)
    return dict(zip(trainings, found, strict=True))


@pytest.mark.parametrize("options", TRAININGS, ids=" ".join)
def test_a_step_moves_what_is_planned(
    moved: dict[tuple[str, ...], dict[str, Any]], options: tuple[str, ...]
) -> None:
    for direction in ("read", "written"):
        planned = sum(moved[options][direction]["planned"].values())
        assert moved[options][direction]["measured"] == pytest.approx(planned, rel=0.02)


@pytest.mark.parametrize("options", MUONS, ids=" ".join)
def test_a_step_of_muon_moves_and_keeps_what_the_documents_say(
    moved: dict[tuple[str, ...], dict[str, Any]], options: tuple[str, ...]
) -> None:
    """After and during backward, clipped, with momentum in 8 bits; the kernel counts the same."""
    found = moved[options]
    for direction, element_bytes in zip(("read", "written"), MUONS[options], strict=True):
        measured = found[direction]["measured"]
        assert measured / found["numel"] == pytest.approx(element_bytes, rel=0.02), direction
        counted = found[direction]["kernel"]  # zero on tmpfs
        assert counted in (0, pytest.approx(measured, rel=0.05)), direction
    for place in ("host", "drive"):
        assert found[place]["measured"] == pytest.approx(found[place]["planned"], rel=0.02), place


@pytest.mark.parametrize("options", AHEAD, ids=" ".join)
def test_a_step_that_gathers_ahead_moves_what_is_planned_besides_parameters(
    moved: dict[tuple[str, ...], dict[str, Any]], options: tuple[str, ...]
) -> None:
    read, written = moved[options]["read"], moved[options]["written"]
    planned = sum(read["planned"].values()) - read["planned"][PARAMETERS]
    assert read["measured"] - read["parameters"] == pytest.approx(planned, rel=0.02)
    assert written["measured"] == pytest.approx(sum(written["planned"].values()), rel=0.02)


@pytest.mark.parametrize("options", TRAININGS + AHEAD, ids=" ".join)
def test_a_pass_reads_a_parameter_once_at_most(
    moved: dict[tuple[str, ...], dict[str, Any]], options: tuple[str, ...]
) -> None:
    assert max(moved[options]["reads_in_a_pass"], default=0.0) <= 1.0


def test_a_step_in_slices_moves_and_gathers_what_a_whole_one_does(
    moved: dict[tuple[str, ...], dict[str, Any]],
) -> None:
    for count in SLICES:
        found = moved[sliced(count)]
        for direction in ("read", "written"):
            of_whole = moved[sliced(1)][direction]["measured"]
            assert found[direction]["measured"] == of_whole, count
            counted = found[direction]["kernel"]  # of what this process moves; zero on tmpfs
            assert counted in (0, pytest.approx(of_whole, rel=0.01)), count
        for phase in ("forward", "backward"):
            assert set(found["gathers"][phase]) == {1.0}, (count, phase)


def test_one_layer_is_gathered_at_once_where_nothing_is_gathered_ahead(
    moved: dict[tuple[str, ...], dict[str, Any]],
) -> None:
    for count in SLICES:
        assert moved[sliced(count)]["at_once"] == 3
