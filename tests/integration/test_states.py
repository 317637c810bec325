"""Training with fewer bits in the optimizer: near fp32, exact when resumed, changed both ways."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.program import RunProgram

PROGRAM = Path(__file__).with_name("states_program.py")
pytestmark = pytest.mark.deepspeed


#: Dtypes of moments, and of master weights, and ranks.
PLAIN = ("bf16", "fp32", 1)
FORMS = [
    PLAIN,
    pytest.param(("int8", "fp32", 1), marks=pytest.mark.full),
    ("int8", "bf16+8", 2),
    pytest.param(("int8/bf16", "bf16+8", 1), marks=pytest.mark.full),
]
#: Dtypes of moments as they are read.
READ = {
    "bf16": {"exp_avg": "bfloat16", "exp_avg_sq": "bfloat16"},
    "int8": {"exp_avg": "float32", "exp_avg_sq": "float32"},
    "int8/bf16": {"exp_avg": "float32", "exp_avg_sq": "bfloat16"},
}


@pytest.fixture(scope="module")
def run_form(
    run_program: RunProgram, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[tuple[str, str, int]], dict[str, Any]]:
    """Returns what every engine of the program left, for a form."""

    @functools.cache
    def run(form: tuple[str, str, int]) -> dict[str, Any]:
        *dtypes, ranks = form
        folder = tmp_path_factory.mktemp("states")
        content: dict[str, Any] = run_program(str(PROGRAM), *dtypes, str(folder), ranks=ranks)
        return content | {"form": form}

    return run


@pytest.fixture(params=FORMS, ids=lambda form: " ".join(map(str, form)))
def found(
    request: pytest.FixtureRequest, run_form: Callable[[tuple[str, str, int]], dict[str, Any]]
) -> dict[str, Any]:
    """The same for each form."""
    return run_form(request.param)


def of_kind(digests: dict[str, str], *kinds: str) -> dict[str, str]:
    """Those of some kinds, named by the part of their name that is the parameter's."""
    return {
        f"{name.split(' ')[0]} {kind.split(' ')[0]}": digest
        for name, digest in digests.items()
        for kind in kinds
        if name.split(" ", 1)[1] == kind
    }


def test_a_checkpoint_gets_bf16_or_fp32_and_accessors_give_fp32(found: dict[str, Any]) -> None:
    expected = {"None": "float32"} | READ[found["form"][0]]
    stored = {state: dtype.removeprefix("torch.") for state, dtype in found["whole"]["stored"]}
    assert stored == expected
    assert all(value.startswith("torch.float32 ") for value in found["whole"]["end"].values())


def test_losses_are_near_those_of_fp32_and_not_the_same(found: dict[str, Any]) -> None:
    narrow, wide = found["half"]["losses"], found["fp32"]["losses"]
    assert narrow == pytest.approx(wide, rel=0.02)
    assert found["half"]["end"] != found["fp32"]["end"]


def test_a_resumed_run_is_the_one_that_was_not_interrupted(found: dict[str, Any]) -> None:
    whole, half, resumed = found["whole"], found["half"], found["resumed"]
    assert half["losses"] + resumed["losses"] == whole["losses"]
    assert resumed["start"] == half["end"]
    assert resumed["end"] == whole["end"]


def test_neither_tiles_nor_when_they_are_stepped_show(found: dict[str, Any]) -> None:
    small, whole = found["small tiles"], found["whole"]
    assert small["losses"] == whole["losses"]
    assert small["end"] == whole["end"]
    assert small["early tiles"] > whole["early tiles"] == 0


def test_moments_are_widened_by_a_run_in_fp32(found: dict[str, Any]) -> None:
    widened = found["widened"]
    assert widened["start"] == found["half"]["end"]
    assert {dtype for _, dtype in widened["stored"]} == {"torch.float32"}
    # It goes on in fp32: its moments are not what it was given any more.
    kinds = ("exp_avg", "exp_avg_sq")
    rounded = of_kind(widened["end"], *(f"{kind} rounded" for kind in kinds))
    assert of_kind(widened["end"], *kinds) != rounded


def test_cpu_offload_widens_them_as_well(found: dict[str, Any]) -> None:
    assert found["stock"]["start"] == found["half"]["end"]
    assert len(found["stock"]["losses"]) == len(found["resumed"]["losses"])


def test_moments_in_fp32_are_rounded_to_nearest_by_a_run_in_bf16(
    run_form: Callable[[tuple[str, str, int]], dict[str, Any]],
) -> None:
    found = run_form(PLAIN)
    start, saved = found["rounded"]["start"], found["fp32"]["end"]
    kinds = ("exp_avg", "exp_avg_sq")
    assert of_kind(start, *kinds) == of_kind(saved, *(f"{kind} rounded" for kind in kinds))
    assert of_kind(start, *kinds) != of_kind(saved, *kinds)
    assert of_kind(start, "master") == of_kind(saved, "master")


def test_a_universal_checkpoint_has_fp32_and_gives_a_run_the_same(
    found: dict[str, Any],
) -> None:
    assert found["universal dtypes"] == ["torch.float32"]
    assert found["universal run"]["start"] == found["half"]["end"]
    assert found["universal run"]["losses"] == found["resumed"]["losses"]
