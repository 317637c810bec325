"""`memascend plan --plot`: a picture, or an error that says why there is none."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from memascend.cli.main import main
from tests.support.plan_models import SMALL


def test_a_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    assert main(["plan", "Llama-3.1-8B", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plan", "Llama-3.1-8B", "--plot", str(tmp_path / "plan.png")]) == 1
    assert "pip install 'memascend[plot]'" in capsys.readouterr().err


def test_a_model_whose_name_has_signs_of_a_formula_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "a $^$ b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | SMALL))
    path = tmp_path / "plan.png"
    assert main(["plan", str(folder), "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
