"""`memascend env`: the facts of an issue, also where packages or hardware are missing."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from memascend.base.units import GIB
from memascend.cli import env
from memascend.cli.main import main
from memascend.system.gpus import Gpu
from memascend.version import __version__


def test_an_issue_gets_versions_and_hardware(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(env, "list_gpus", lambda: [Gpu("NVIDIA H100", 80 * GIB, "560.35")])
    assert main(["env", "--path", str(tmp_path)]) == 0
    found = dict(line[2:].split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert found["memascend"] == __version__
    assert found["torch"] == importlib.metadata.version("torch")
    assert found["GPU"] == "NVIDIA H100, 80.00 GiB, driver 560.35"
    assert {*env.PACKAGES, "Python", "CUDA of torch", "system", "host memory"} <= set(found)
    assert " free, " in found["drive"]


def test_it_imports_neither_torch_nor_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    assert env.facts(Path())["deepspeed"] == importlib.metadata.version("deepspeed")


def test_missing_packages_and_folders_are_facts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(env, "PACKAGES", ("no-such-package",))
    monkeypatch.setattr(env, "list_gpus", list)
    found = env.facts(tmp_path / "nosuch")
    assert found["no-such-package"] == env.NOT_FOUND
    assert found["GPU"] == "none found by nvidia-smi"
    assert found["drive"] == f"{tmp_path}/nosuch is not a folder"
