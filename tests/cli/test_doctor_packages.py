"""What `memascend doctor` says of installed packages: releases, their code, what is missing."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from memascend.cli import doctor_packages
from memascend.config.installed import MUON
from memascend.deepspeed.seams.compare import Comparison
from memascend.deepspeed.seams.fingerprints import VERSIONS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("version", "state"),
    [("2.4.1+cu121", "problem"), ("1.13.0", "problem"), ("2.5.0", "ok"), ("2.13.0+cpu", "ok")],
)
def test_a_torch_that_is_too_old_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, version: str, state: str
) -> None:
    """It does not load memascend, so that a block has no effect."""
    only_these(monkeypatch, {"torch": version})
    check = doctor_packages.check_torch()
    assert check.state == state
    assert check.found.startswith(version)
    assert check.fix == ("pip install 'torch>=2.5'" if state == "problem" else "")


def test_a_torch_that_is_missing_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    only_these(monkeypatch, {})
    check = doctor_packages.check_torch()
    assert (check.state, check.found) == ("problem", "missing")


def test_the_oldest_torch_is_the_one_that_pip_is_given() -> None:
    oldest = ".".join(map(str, doctor_packages.TORCH_OLDEST))
    assert f'"torch>={oldest}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("version", "differing", "state", "fix"),
    [
        ("0.19.8", {}, "ok", ""),
        ("0.19.10", {}, "note", "deepspeed==0.19.8, if your framework takes it"),
        ("0.19.8", {"engine.step": "0"}, "problem", "was patched"),
        ("0.17.6", {"engine.step": "missing"}, "problem", "is older than"),
        ("0.20.0", {"engine.step": "0"}, "problem", "is newer than"),
    ],
)
def test_a_deepspeed_is_judged_by_its_code(
    monkeypatch: pytest.MonkeyPatch, version: str, differing: dict[str, str], state: str, fix: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    monkeypatch.setattr(doctor_packages, "compare", lambda: Comparison("0.19.8", differing))
    check = doctor_packages.check_deepspeed()
    assert check.state == state
    assert version in check.found
    assert fix in check.fix


def test_a_release_that_cannot_do_everything_is_a_note_with_the_releases_that_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.18.9")
    monkeypatch.setattr(doctor_packages, "compare", lambda: Comparison("0.18.9", {}))
    monkeypatch.setattr(doctor_packages, "is_able", lambda ability: ability is MUON)
    check = doctor_packages.check_deepspeed()
    assert check.state == "note"
    assert "cpu_checkpointing (0.19.6)" in check.found
    assert "(0.19.8)" in check.found
    assert "Muon" not in check.found
    assert "deepspeed==0.19.8, if your framework takes it" in check.fix


def test_a_deepspeed_that_cannot_be_imported_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.19.8")
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    check = doctor_packages.check_deepspeed()
    assert check.state == "problem"
    assert "cannot be imported" in check.found
    assert "pip install" in check.fix


@pytest.mark.parametrize(
    ("unknown", "state", "named"),
    [([], "ok", "5.6.0"), (["load_state_dict (c33c)"], "note", "load_state_dict")],
)
def test_a_transformers_is_judged_by_its_loader(
    monkeypatch: pytest.MonkeyPatch, unknown: list[str], state: str, named: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "5.6.0")
    monkeypatch.setattr(doctor_packages.transformers_seams, "unknown_definitions", lambda: unknown)
    check = doctor_packages.check_transformers()
    assert check.state == state
    assert check.found.startswith("5.6.0")
    assert named in check.found
    assert bool(check.fix) == (state != "ok")


def only_these(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    """Gives doctor an environment that has these distributions."""

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_frameworks_are_named_with_their_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    only_these(monkeypatch, {"trl": "1.9.0", "axolotl": "0.19.0", "numpy": "2.4"})
    check = doctor_packages.check_frameworks()
    assert (check.state, check.found) == ("ok", "trl 1.9.0, axolotl 0.19.0")


def test_a_loop_of_ones_own_needs_neither_transformers_nor_a_framework(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only_these(monkeypatch, {})
    assert [
        doctor_packages.check_transformers().state,
        doctor_packages.check_frameworks().state,
    ] == ["ok", "ok"]


def test_a_package_that_is_missing_is_in_the_way() -> None:
    name = "no-package-has-this-name"
    check = doctor_packages._package(name)
    assert (check.state, check.found, check.fix) == ("problem", "missing", f"pip install {name}")


def test_a_deepspeed_that_is_missing_is_installed_in_a_release_that_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only_these(monkeypatch, {})
    assert doctor_packages.check_deepspeed().fix == f"pip install deepspeed=={VERSIONS[-1]}"


def test_a_deepspeed_that_misses_the_cuda_toolkit_is_not_to_be_installed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deepspeed.py").write_text("raise Exception('CUDA_HOME does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.18.4")
    check = doctor_packages.check_deepspeed()
    assert check.state == "problem"
    assert check.fix.startswith("set CUDA_HOME to a CUDA toolkit")
