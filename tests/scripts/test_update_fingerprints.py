"""The table of fingerprints, and the report about a release that differs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from memascend.deepspeed.seams import fingerprints
from memascend.deepspeed.seams.compare import Comparison
from tests.support.scripts import load_script

STEP = "deepspeed.runtime.engine.DeepSpeedEngine.step"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    pytest.importorskip("deepspeed")
    return load_script("update_fingerprints")


def release(script: ModuleType, version: str, **found: str) -> Any:
    sources = {name: f"def {name}():\n    return {text!r}\n" for name, text in found.items()}
    return script.Release(version, f"files of {version}", found, sources)


def test_a_fingerprint_stands_once_with_the_first_release_that_has_it(script: ModuleType) -> None:
    releases = [
        release(script, "1.0", load="a", step="a"),
        release(script, "1.1", load="a", step="b"),
        release(script, "1.2", load="a", step="a"),
    ]
    table: dict[str, Any] = {}
    exec(script.table(releases), table)
    assert table["DIGESTS"] == {one.version: one.digest for one in releases}
    assert table["VERSIONS"] == ("1.0", "1.1", "1.2")
    assert table["KNOWN"] == {"load": "1.0 a", "step": "1.0 a 1.1 b 1.2 a"}


def test_releases_are_in_the_order_of_their_numbers(script: ModuleType) -> None:
    assert sorted(["0.19.10", "0.19.9", "0.18.9"], key=script.numbers) == [
        "0.18.9",
        "0.19.9",
        "0.19.10",
    ]


def test_the_table_that_is_there_is_as_the_script_writes_it(script: ModuleType) -> None:
    """Each release has the definitions that the table says, so that writing changes nothing."""
    from memascend.deepspeed.seams.compare import known_definitions

    releases = [
        script.Release(version, digest, known_definitions(version), {})
        for version, digest in fingerprints.DIGESTS.items()
    ]
    assert script.table(releases) == Path(fingerprints.__file__).read_text(encoding="utf-8")


def test_the_report_has_the_changes_our_files_and_the_tests_of_both(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = script.Release("0.19.8", "", {STEP: "a"}, {STEP: "def step(self):\n    a()\n    b()\n"})
    new = replace(old, version="0.19.9", definitions={STEP: "b"})
    new.sources[STEP] = "def step(self):\n    a()\n    c()\n"
    old = replace(old, sources={STEP: "def step(self):\n    a()\n    b()\n"})
    monkeypatch.setattr(script, "read", lambda version, folder: old)
    monkeypatch.setattr(script, "nearest", lambda found: Comparison("0.19.8", dict(found)))
    assert script.report(new, Path()) == 1
    printed = capsys.readouterr().out
    for part in (
        "DeepSpeed 0.19.9 against 0.19.8: 1 definitions differ",
        f"== {STEP}",
        "-    b()",
        "+    c()",
        "memascend/deepspeed/monitor/engine.py",
        "tests/deepspeed/monitor/test_engine.py",
    ):
        assert part in printed
    monkeypatch.setattr(script, "nearest", lambda found: Comparison("0.19.8", {}))
    assert script.report(new, Path()) == 0
