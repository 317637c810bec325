"""Which releases `make test-releases` tries, and that no failure of one passes in silence."""

from __future__ import annotations

import _bz2
import importlib
import re
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

from memascend.deepspeed.seams.fingerprints import VERSIONS
from tests.support.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("try_releases")


def default_releases() -> list[str]:
    """Return the releases that `make test-releases` tries."""
    [line] = re.findall(r"^RELEASES \?= (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.M)
    return str(line).split()


def test_the_oldest_release_is_tried_and_one_that_is_neither_oldest_nor_newest() -> None:
    oldest, middle = default_releases()
    assert oldest == VERSIONS[0]
    assert middle in VERSIONS[1:-1]
    workflow = ROOT / ".github" / "workflows" / "ci.yml"
    assert "run: make test-releases" in workflow.read_text("utf-8")


def test_the_files_of_its_tests_are_there(script: ModuleType) -> None:
    assert all((ROOT / name).exists() for name in script.FILES)
    assert "def test_every_section_alone" in (ROOT / script.FILES[0]).read_text("utf-8")


@pytest.mark.parametrize(
    ("failing", "problem"),
    [
        ("pip", "pip cannot install it"),
        ("sys.exit", "another one was imported"),
        ("builder.load", "its operators cannot be compiled"),
        ("tests/parity", "tests of parity failed"),
        ("", ""),
    ],
)
def test_each_failure_is_named_and_ends_with_status_1(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failing: str,
    problem: str,
) -> None:
    folders: list[tuple[str, str]] = []

    def call(*words: str, **variables: str) -> int:
        if variables:
            folders.append((variables["PYTHONPATH"], variables["TORCH_EXTENSIONS_DIR"]))
        fails = bool(failing) and "0.18.4" in f"{words} {variables}" and failing in f"{words}"
        (tmp_path / "0.19.2").mkdir(exist_ok=True)
        (tmp_path / "0.18.4").mkdir(exist_ok=True)
        return 3 if fails else 0

    monkeypatch.setattr(script, "call", call)
    status = script.main(["--folder", str(tmp_path), "0.18.4", "0.19.2"])
    printed = capsys.readouterr().out
    assert status == (1 if problem else 0)
    assert (f"0.18.4: {problem}" in printed) == bool(problem)
    assert ("passed with 0.18.4, 0.19.2" in printed) == (not problem)
    # The other release is tried all the same, before the installed one on the path.
    assert folders[-1][0].startswith(str(tmp_path / "0.19.2"))
    assert folders[-1][1] == str(tmp_path / "0.19.2" / "operators")


def test_a_release_is_installed_once(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def call(*words: str, **_: str) -> int:
        (tmp_path / "0.19.2").mkdir(exist_ok=True)
        ran.append(words[1])
        return 0

    monkeypatch.setattr(script, "call", call)
    for _ in range(2):
        assert script.try_release("0.19.2", tmp_path) == ""
    assert ran.count("pip") == 1


def test_an_operator_of_the_installed_release_stands_for_that_of_another(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(script, "SHARED", {"_bz2": "adam"})
    compiled = tmp_path / "_bz2" / "_bz2.so"
    compiled.parent.mkdir()
    compiled.symlink_to(_bz2.__file__)
    package = tmp_path / "deepspeed"
    (package / "ops").mkdir(parents=True)
    notes = package / "git_version_info_installed.py"
    made = "installed_ops={'_bz2': False, 'async_io': False}\ntorch_info={'version': '1.0'}"
    notes.write_text(made)
    script.share_operators(package)
    found = runpy.run_path(str(notes))
    assert found["installed_ops"] == {"_bz2": True, "async_io": False}
    assert found["accelerator_name"] == "cpu"
    assert metadata.version("torch").startswith(f"{found['torch_info']['version']}.")
    monkeypatch.syspath_prepend(package / "ops" / "adam")
    operator = importlib.import_module("_bz2_op")
    assert operator.__file__ == str(compiled)
    assert operator.BZ2Compressor


def test_the_smoke_run_has_a_test_of_each_data_path(script: ModuleType) -> None:
    """Its words are parts of names, which change with the cases of `make test`."""
    options = ["-n", "0", "--collect-only", "-k", script.SMOKE]
    done = subprocess.run(
        [sys.executable, *script.TESTS, *options], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith("tests/")]
    assert len(found) == script.SMOKE.count(" or ") + 1, found


@pytest.mark.deepspeed
@pytest.mark.full
@pytest.mark.timeout(1500)  # a minute, but on a busy machine
@pytest.mark.parametrize("release", default_releases())
def test_an_older_release_trains_as_cpu_offload_on_the_installed_operators(
    script: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str], release: str
) -> None:
    status = script.main(["--smoke", "--folder", str(tmp_path), release])
    printed = capfd.readouterr().out
    assert status == 0, printed
    [passed] = re.findall(r"^(\d+) passed, \d+ deselected", printed, re.M)
    assert int(passed) == script.SMOKE.count(" or ") + 1
    assert not (tmp_path / f"{release}-smoke" / "operators").exists(), "it compiled"
