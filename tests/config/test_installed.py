"""Abilities of the installed DeepSpeed are read from its files, without an import."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from memascend.config import installed
from memascend.config.installed import ABILITIES, HOST_BUILDERS, MUON, RANGE, Ability, is_able
from memascend.deepspeed.seams.fingerprints import VERSIONS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A DeepSpeed that has nothing yet."""
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("raise ImportError('it was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    installed._has.cache_clear()
    return tmp_path / "deepspeed"


@pytest.mark.parametrize("ability", [*ABILITIES, HOST_BUILDERS])
def test_an_ability_is_a_name_in_deepspeeds_files(ability: Ability, release: Path) -> None:
    assert not is_able(ability)
    file = release / ability.file
    file.parent.mkdir(parents=True)
    file.write_text(f"class C:\n    {ability.sign}\n")
    installed._has.cache_clear()
    assert is_able(ability)
    assert "deepspeed" not in sys.modules


def test_without_deepspeed_nothing_is_known_to_be_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "_folder", lambda: None)
    assert all(map(is_able, ABILITIES))


def test_the_newest_release_has_every_ability() -> None:
    pytest.importorskip("deepspeed")
    assert installed._folder() is not None
    assert all(map(is_able, [*ABILITIES, HOST_BUILDERS]))


def test_the_range_is_the_one_that_pip_is_given_and_a_refusal_stays_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert f'"deepspeed{RANGE}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f">={VERSIONS[0]}" in RANGE
    monkeypatch.setattr(installed, "RANGE", ">=1.0,<1.5")
    assert f"'deepspeed>={MUON.since},<1.5'" in str(installed.refusal(MUON, "M"))
