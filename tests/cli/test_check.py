"""Findings as they are printed: a line each, with its remedy below, and the verdict."""

from __future__ import annotations

import pytest

from memascend.cli.check import Check, print_findings

OK, NOTE = Check("torch", "ok", "2.13.0"), Check("heap", "note", "jemalloc", "unset it")


def test_a_remedy_stands_below_its_finding(capsys: pytest.CaptureFixture[str]) -> None:
    print_findings([OK, NOTE])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:3] == [
        ["ok", "torch", "2.13.0"],
        ["note", "heap", "jemalloc"],
        ["->", "unset", "it"],
    ]
    assert "ready; 1 note(s)" in " ".join(lines[-1])
