"""The table of fingerprints, and the report about a release that differs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from memascend.deepspeed.seams import fingerprints
from memascend.deepspeed.seams.compare import Comparison
from tests.support.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
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


@pytest.mark.parametrize(
    ("name", "test"),
    [("csrc/includes/cpu_adam.h", "beta_powers"), ("zero.muon/original_muon.py", "ahead_muon")],
)
def test_a_file_of_deepspeed_goes_by_its_name(script: ModuleType, name: str, test: str) -> None:
    files, tests = script.who_speaks_of(f"deepspeed.{name}")
    assert len(files) <= 3
    assert len(tests) <= 10
    assert f"tests/deepspeed/optimizer/test_{test}.py" in tests


def test_a_word_that_many_files_have_counts_beside_its_class_or_where_it_is_replaced(
    script: ModuleType,
) -> None:
    files, tests = script.who_speaks_of(STEP)
    assert "memascend/deepspeed/monitor/engine.py" in files
    assert "memascend/deepspeed/optimizer/tiled.py" not in files
    assert len(tests) <= 20
    files, _ = script.who_speaks_of("deepspeed.runtime.zero.partition_parameters.Init.ds_id")
    assert "memascend/deepspeed/parameters/swapper.py" in files  # nobody says Init.ds_id
    assert len(files) > script.COMMON


def test_a_class_that_is_made_goes_by_its_name(script: ModuleType) -> None:
    _, tests = script.who_speaks_of("deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler.__init__")
    assert "tests/deepspeed/optimizer/test_upstream.py" in tests
    assert len(tests) <= 10


@pytest.mark.parametrize(
    ("release", "times"), [("0.19.9", 1), ("git+https://github.com/deepspeedai/DeepSpeed", 2)]
)
def test_only_a_release_with_a_number_is_taken_from_its_folder(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    release: str,
    times: int,
) -> None:
    installed: list[str] = []

    def run(command: list[str], **_: Any) -> Any:
        if "--target" in command:
            place = Path(command[command.index("--target") + 1])
            assert not place.exists(), "pip would leave it as it is"
            (place / "deepspeed").mkdir(parents=True)
            installed.append(command[-1])
        read = script.Release("0.19.9", "", {}, {}).__dict__
        return SimpleNamespace(stdout=json.dumps(read))

    monkeypatch.setattr(script.subprocess, "run", run)
    for _ in range(2):
        assert script.read(release, tmp_path).version == "0.19.9"
    assert len(installed) == times
    assert installed[0].endswith(release)


@pytest.mark.parametrize("is_there", [True, False])
def test_the_nightly_workflow_trains_with_the_new_release_and_no_other(
    tmp_path: Path, is_there: bool
) -> None:
    text = (ROOT / ".github" / "workflows" / "deepspeed.yml").read_text("utf-8")
    steps = yaml.safe_load(text)["jobs"]["newest"]["steps"]
    [step] = [one for one in steps if "tests/parity" in one.get("run", "")]
    for name in ("newest/0.19.8", *["newest/deepspeed"] * is_there, "pinned"):
        package = tmp_path / name / "deepspeed"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(  # the pinned release is behind PYTHONPATH
        '#!/bin/sh\n[ "$1" = -m ] && echo "trains with $PYTHONPATH" && exit\n'
        f'PYTHONPATH="$PYTHONPATH:pinned" exec "{sys.executable}" "$@"\n'
    )
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", "-e", "-c", step["run"]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    trained = done.stdout.startswith(f"trains with {tmp_path}/newest/deepspeed\n")
    assert (done.returncode == 0, trained) == (is_there, is_there), done.stdout + done.stderr
