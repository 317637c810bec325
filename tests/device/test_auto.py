"""Are the slices that are chosen the fewest that fit the device, with the bits of their number?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.device.emulator.build import why_not
from tests.device.test_context import SAVING, SHAPE, block_and_config
from tests.support.program import RunProgram

PROGRAM = Path(__file__).with_name("auto_program.py")
SEQUENCES, TOKENS, FITS = 16, 128, 8


def run(
    folder: Path,
    run_program: RunProgram,
    section: dict[str, Any],
    *,
    ranks: int,
    more: dict[str, Any] | None = None,
) -> dict[str, Any]:
    if reason := why_not():
        pytest.skip(reason)
    block, config = block_and_config(folder)
    config["memascend"] = block | (more or {})
    config["optimizer"]["params"] |= {"lr": 0.0, "weight_decay": 0.0}
    values = {"config": config, "section": section, "shape": SHAPE | {"num_hidden_layers": 3}}
    values |= {"tokens": TOKENS, "sequences": SEQUENCES, "fits": FITS}
    asked = folder / "asked.json"
    asked.write_text(json.dumps(values))
    found: dict[str, Any] = run_program(str(PROGRAM), str(asked), ranks=ranks)
    return found


def check_bits(found: dict[str, Any]) -> dict[int, str]:
    """Compare passes with those of stated numbers; return the digests of these."""
    hand = {int(number): one["gradients"] for number, one in found["by_hand"].items()}
    assert len(set(hand.values())) == len(hand), "bits do not depend on the number here"
    for one in (found, found["again"]):
        assert [each["gradients"] for each in one["passes"]] == [hand[1], hand[one["sequences"]]]
    assert found["findings"] == {}
    return hand


@pytest.mark.deepspeed
@pytest.mark.full
@pytest.mark.parametrize(
    ("section", "more"),
    [
        pytest.param({}, {}, marks=pytest.mark.matrix),  # the next one is that and more
        ({}, {"activations": SAVING}),
        pytest.param({"count": "auto", "reduction": "slice"}, {}, marks=pytest.mark.matrix),
    ],
)
def test_chosen_slices_fit_and_have_the_bits_of_their_number_also_where_memory_runs_out(
    tmp_path: Path, run_program: RunProgram, section: dict[str, Any], more: dict[str, Any]
) -> None:
    found = run(tmp_path, run_program, section, ranks=1, more=more)
    sequences = found["sequences"]
    assert FITS // 2 < sequences <= FITS
    assert found["passes"][1]["peak"] <= found["room"]
    hand, disturbed = check_bits(found), found["disturbed"]
    assert disturbed["forward"] == hand[sequences // 2]
    assert disturbed["backward"] == hand[sequences // 4]
    assert "sim: out of device memory" in disturbed["error"]
    assert f"slices of up to {sequences // 2} sequence(s); the next pass" in disturbed["error"]
    *chosen, repeated = found["lines"]
    assert len(chosen) == 2
    assert all(f'{{"micro_batches": {{"sequences": {sequences}}}}}' in line for line in chosen)
    assert f"begins again, with slices of up to {sequences // 2} sequence(s)" in repeated


@pytest.mark.deepspeed
@pytest.mark.full
@pytest.mark.parametrize(
    "section", [pytest.param({}, marks=pytest.mark.matrix), {"reduction": "slice"}]
)
def test_all_ranks_have_the_slices_of_the_rank_with_the_least_room(
    tmp_path: Path, run_program: RunProgram, section: dict[str, Any]
) -> None:
    found = run(tmp_path, run_program, section, ranks=2)
    for one in (found, found["again"]):  # rank 0 alone has room for twice as many
        assert FITS // 4 < one["sequences"] <= FITS // 2
    check_bits(found)
