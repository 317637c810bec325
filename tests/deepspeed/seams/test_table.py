"""The table of seams: every row leads somewhere, and whatever is relied on is watched."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

pytest.importorskip("deepspeed")

from deepspeed.runtime.swap_tensor.optimizer_utils import OptimizerSwapper
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from memascend.deepspeed.optimizer.optimizer import ZeroOptimizer
from memascend.deepspeed.seams import arm, fingerprints
from memascend.deepspeed.seams.fingerprint import fingerprint
from memascend.deepspeed.seams.table import SEAMS, WATCHED, Seam, relied_on
from memascend.deepspeed.stock.optimizer_swapper import PipelinedSwapper, SequentialSwapper

STAGE3 = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"


def named(seam: Seam) -> str:
    return seam.name


def wrap(original: object) -> tuple[str, object]:
    return ("wrapped", original)


def row(**changes: Any) -> Seam:
    given = {"name": "n", "module": "json", "attribute": "dumps", "reason": "r"}
    return Seam(**{**given, "replacement": f"{__name__}:wrap", **changes})


# -- rows ----------------------------------------------------------------------------------------


def test_a_wrapper_gets_the_original_and_anything_else_stands_there_itself() -> None:
    assert row().replace("stock") == ("wrapped", "stock")
    replaced = row(is_wrapper=False).replace("stock")
    assert replaced is importlib.import_module(__name__).wrap


@pytest.mark.parametrize("replacement", [f"{__name__}:no_such", "memascend.no_such_module:wrap"])
def test_a_replacement_that_is_not_there_fails(replacement: str) -> None:
    with pytest.raises((AttributeError, ModuleNotFoundError), match="no_such"):
        row(replacement=replacement).replace("stock")


@pytest.mark.parametrize("seam", SEAMS, ids=named)
def test_a_row_has_a_reason_and_a_replacement_of_ours(seam: Seam) -> None:
    assert seam.reason
    module, _, name = seam.replacement.partition(":")
    assert module.startswith("memascend.deepspeed.")
    assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize("seam", [seam for seam in SEAMS if seam.older], ids=named)
def test_a_row_for_older_releases_names_a_definition_that_is_watched(seam: Seam) -> None:
    assert (seam.module, seam.older) in WATCHED


@pytest.mark.parametrize("seam", SEAMS, ids=named)
def test_a_row_replaces_what_upstream_has_but_for_the_one_that_adds(seam: Seam) -> None:
    arm.disarm()
    assert (arm.find(seam) is arm.ABSENT) == (seam.attribute == "DeepSpeedEngine.memascend")


def test_names_and_targets_are_unique() -> None:
    assert len({seam.name for seam in SEAMS}) == len(SEAMS)
    targets = [(seam.module, seam.attribute) for seam in SEAMS]
    assert len({*targets, *WATCHED}) == len(targets) + len(WATCHED)


# -- what is relied on ---------------------------------------------------------------------------


def test_fingerprints_are_of_what_is_relied_on_and_nothing_else() -> None:
    known = {f"{module}.{attribute}" for module, attribute in relied_on()}
    assert set(fingerprints.KNOWN) == known
    assert {f"{module}.{attribute}" for module, attribute in WATCHED} <= known


def test_of_a_definition_used_by_name_only_the_code_may_change() -> None:
    by_name = {(seam.module, seam.attribute) for seam in SEAMS} - set(relied_on())
    assert {attribute.rpartition(".")[2] for _, attribute in by_name} == {
        "AsyncIOBuilder",
        "DeepSpeedZeroOptimizer_Stage3",
        "memascend",
    }


@pytest.mark.parametrize(("module", "attribute"), WATCHED)
def test_what_is_watched_is_there(module: str, attribute: str) -> None:
    assert fingerprint(module, attribute) in fingerprints.KNOWN[f"{module}.{attribute}"].split()


def test_every_upstream_method_that_ours_overrides_is_watched() -> None:
    upstream = vars(DeepSpeedZeroOptimizer_Stage3)
    overridden = {n for n, value in vars(ZeroOptimizer).items() if callable(value)} & set(upstream)
    assert {f"{STAGE3}.{name}" for name in overridden} <= set(fingerprints.KNOWN)


def test_one_class_of_ours_stands_over_the_stock_optimizer() -> None:
    assert ZeroOptimizer.__mro__[1] is DeepSpeedZeroOptimizer_Stage3
    ours = {
        kind
        for kind in every_subclass(DeepSpeedZeroOptimizer_Stage3)
        if kind.__module__.startswith("memascend.")
    }
    assert ours == {ZeroOptimizer}


@pytest.mark.parametrize("kind", [SequentialSwapper, PipelinedSwapper])
def test_the_bases_of_our_swappers_are_watched_whole(kind: type) -> None:
    stock = [base for base in kind.__mro__ if base.__module__.startswith("deepspeed.")]
    assert OptimizerSwapper in stock
    assert {f"{base.__module__}.{base.__name__}" for base in stock} <= set(fingerprints.KNOWN)


def every_subclass(kind: type) -> list[type]:
    found = kind.__subclasses__()
    return [*found, *(lower for one in found for lower in every_subclass(one))]
