"""`memascend doctor` on the speed of a drive: measured, or assumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from memascend.cli import doctor
from memascend.config.environment import cache_directory
from memascend.plan.drive_rates import READ_GB_S, WRITE_GB_S
from memascend.volumes.kept import KeptRates, keep_rates


def test_the_speed_is_the_one_that_a_plan_counts_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    check = doctor._rates(tmp_path)
    assert check.state == "note"
    assert f"{READ_GB_S:g} GB/s read, {WRITE_GB_S:g} GB/s written" in check.found
    assert check.fix == f"memascend volume bench --sustained {tmp_path}"
    keep_rates(str(tmp_path), KeptRates(2.0, 0.5, 0.9), cache=cache_directory())
    check = doctor._rates(tmp_path)
    assert (check.state, check.fix) == ("ok", "")
    assert "2 GB/s read, 0.5 GB/s written and 0.9 GB/s of both" in check.found
