"""The installed DeepSpeed is compared with each known release as a whole."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("deepspeed")

import deepspeed

from memascend.deepspeed.seams import compare as module
from memascend.deepspeed.seams import fingerprints, table
from memascend.deepspeed.seams.compare import MISSING, Comparison, compare, known_definitions

ONE, OTHER = "a" * 16, "b" * 16


@pytest.fixture
def table_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three releases; `step` changed in the second, `flag` came with the third."""
    monkeypatch.setattr(fingerprints, "VERSIONS", ("1.0", "1.1", "1.2"))
    monkeypatch.setattr(fingerprints, "DIGESTS", {})
    known = {
        "engine.load": f"1.0 {ONE}",
        "engine.step": f"1.0 {ONE} 1.1 {OTHER}",
        "engine.flag": f"1.0 {MISSING} 1.2 {ONE}",
    }
    monkeypatch.setattr(fingerprints, "KNOWN", known)


def installed(monkeypatch: pytest.MonkeyPatch, step: str, flag: str, load: str = ONE) -> Comparison:
    found = {"engine.load": load, "engine.step": step, "engine.flag": flag}
    monkeypatch.setattr(module, "definitions", lambda: found)
    return compare()


@pytest.mark.usefixtures("table_of_three")
@pytest.mark.parametrize(
    ("step", "flag", "release"),
    [(ONE, MISSING, "1.0"), (OTHER, MISSING, "1.1"), (OTHER, ONE, "1.2")],
)
def test_a_release_is_that_which_has_all_its_definitions(
    monkeypatch: pytest.MonkeyPatch, step: str, flag: str, release: str
) -> None:
    assert installed(monkeypatch, step, flag) == Comparison(release, {})


@pytest.mark.usefixtures("table_of_three")
def test_a_mixture_of_releases_is_none_of_them_though_all_its_definitions_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = installed(monkeypatch, step=ONE, flag=ONE)
    assert found.differing == {"engine.step": ONE}
    assert found.release == "1.2"


@pytest.mark.usefixtures("table_of_three")
def test_a_definition_that_is_gone_is_known_only_where_a_release_lacks_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = installed(monkeypatch, step=OTHER, flag=ONE, load=MISSING)
    assert found == Comparison("1.2", {"engine.load": MISSING})


@pytest.mark.usefixtures("table_of_three")
def test_the_newest_of_releases_that_are_as_like_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fingerprints.KNOWN, "engine.flag", f"1.0 {ONE}")
    assert installed(monkeypatch, step=OTHER, flag=ONE) == Comparison("1.2", {})


# -- the installed one -----------------------------------------------------------------------------


def test_the_digest_of_a_known_release_needs_no_look_at_its_definitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(module, "definitions")
    assert compare() == Comparison(deepspeed.__version__, {})


def test_one_changed_file_changes_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    original = module.file_fingerprint

    def changed(name: str, path: str = "") -> str:
        return "0" * 16 if path else original(name, path)

    monkeypatch.setattr(module, "file_fingerprint", changed)
    assert module.digest_of_files() != fingerprints.DIGESTS[deepspeed.__version__]


def test_without_its_digest_a_known_release_is_known_by_its_definitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fingerprints, "DIGESTS", {})
    assert compare() == Comparison(deepspeed.__version__, {})


# -- the table -------------------------------------------------------------------------------------


def test_every_definition_is_known_for_every_release_oldest_first() -> None:
    names = {f"{module}.{attribute}" for module, attribute in table.relied_on()}
    order = fingerprints.VERSIONS
    assert [*order] == sorted(order, key=lambda one: [*map(int, one.split("."))])
    for release in order:
        assert set(known_definitions(release)) == names
    for changes in fingerprints.KNOWN.values():
        words = changes.split()
        assert words[0] == order[0]
        assert [*words[::2]] == sorted(words[::2], key=order.index)
        assert all(re.fullmatch(f"[0-9a-f]{{16}}|{MISSING}", found) for found in words[1::2])


def test_nothing_that_is_relied_on_is_missing_in_the_newest_release() -> None:
    assert MISSING not in known_definitions(fingerprints.VERSIONS[-1]).values()
