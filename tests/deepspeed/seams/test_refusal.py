"""A refused release is told what to install, in three lines that can be read."""

from __future__ import annotations

import pytest

from memascend.deepspeed.seams import refusal as module
from memascend.deepspeed.seams.compare import MISSING, Comparison
from memascend.deepspeed.seams.refusal import advice, refusal


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VERSIONS", ("0.19.8", "0.19.10"))


@pytest.mark.parametrize(
    ("release", "words", "command"),
    [
        ("0.18.4", "is older than", "pip install 'deepspeed==0.19.10'"),
        ("0.19.7", "is older than", "the oldest that works, 0.19.8"),
        ("0.19.8", "was patched", "--force-reinstall --no-deps 'deepspeed==0.19.8'"),
        ("0.19.10+cu130", "was patched", "--force-reinstall --no-deps 'deepspeed==0.19.10'"),
        ("0.19.11", "is newer than", "pip install 'deepspeed==0.19.10'"),
        ("0.20.0", "is newer than", "or install a memascend that supports 0.20.0"),
    ],
)
def test_the_advice_says_how_the_release_compares_and_what_to_run(
    release: str, words: str, command: str
) -> None:
    text = advice(release)
    assert f"DeepSpeed {release} {words}" in text
    assert command in text


def test_a_refusal_is_three_lines_the_advice_first() -> None:
    first, second, third = refusal(
        "0.18.4", Comparison("0.19.8", {"engine.step": "0" * 16})
    ).splitlines()
    assert first == advice("0.18.4")
    assert "most like DeepSpeed 0.19.8" in second
    assert "1 definition(s)" in second
    assert second.endswith("engine.step")
    assert "MEMASCEND_DISABLE=1" in third
    assert '"enabled": false' in third


def test_three_names_are_enough_and_those_that_are_gone_come_first() -> None:
    differing = {f"changed.{number}": "0" * 16 for number in range(40)}
    differing |= {"gone.one": MISSING, "gone.two": MISSING}
    text = refusal("0.18.4", Comparison("0.19.8", differing))
    assert "42 definition(s)" in text
    assert "gone.one (missing), gone.two (missing), changed.0 and 39 more" in text
    assert "changed.1" not in text
    assert "DEBUG" in text
    assert max(map(len, text.splitlines())) < 300
