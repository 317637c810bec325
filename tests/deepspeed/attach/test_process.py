"""Models of one process: their limits add up while they are there, and each has its own report."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

from memascend.deepspeed.attach import process


class Model:
    """Anything that can be referred to weakly."""


def test_limits_add_up_for_as_long_as_the_models_are_there() -> None:
    before = process.limits_bytes()
    first, second, third = Model(), Model(), Model()
    for model, limit_bytes in ((first, 3), (second, 4), (third, None)):
        process.join(model, limit_bytes)
    assert process.limits_bytes() - before == 7
    for _ in range(2):
        process.leave(first)
        assert process.limits_bytes() - before == 4
    del second
    gc.collect()
    assert process.limits_bytes() == before


def test_no_two_models_of_a_process_write_the_same_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    claimed = [process.claim_report(Path("a.b.json")) for _ in range(3)]
    assert claimed == [tmp_path / name for name in ("a.b.json", "a.b-2.json", "a.b-3.json")]
    assert process.claim_report(tmp_path / "a.b-2.json") == tmp_path / "a.b-2-2.json"
    assert process.claim_report(Path("other")) == tmp_path / "other"
