"""What `memascend plan` prints, as a program reads it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from memascend.cli.main import main


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found
