"""Which releases are tried, what counts as expected, and that page and package say the same."""

from __future__ import annotations

import itertools
import re
import subprocess
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement

from memascend.deepspeed.seams.fingerprints import VERSIONS
from tests.support.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("deepspeed", "torch", "transformers")
WHEEL = Path("memascend.whl")
REPORT = """<testsuites><testsuite>
<testcase name="test_every_section_alone_gives_the_bits_of_cpu_offload[llama]"/>
<testcase name="test_a_resumed_run_gives_the_bits_of_one_never_interrupted[a]"/>
<testcase name="test_a_resumed_run_gives_the_bits_of_one_never_interrupted[b]">
<failure message="bits"/></testcase>
<testcase name="test_a_resumed_run_gives_the_bits_of_one_never_interrupted[c]"/>
<testcase name="test_every_kind_of_checkpoint_is_loaded_as_by_stock[1]"><skipped/></testcase>
<testcase name="test_another"/>
</testsuite></testsuites>"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("try_versions")


def facts(**changes: Any) -> dict[str, Any]:
    return {"refusal": "", "knows_weights": True} | changes


def ranges() -> dict[str, Requirement]:
    """Return what pyproject.toml asks for, by package."""
    lines = re.findall(r'"([a-z]+[<>=][^"]*)"', (ROOT / "pyproject.toml").read_text("utf-8"))
    found = [Requirement(line) for line in lines]
    return {requirement.name: requirement for requirement in found}


# -- rows ------------------------------------------------------------------------------------------


def test_the_package_asks_for_what_is_not_refused_and_for_nothing_else(script: ModuleType) -> None:
    allowed = ranges()
    for row in script.ROWS:
        assert allowed["torch"].specifier.contains(row.torch)
        assert allowed["transformers"].specifier.contains(row.transformers)
        assert allowed["deepspeed"].specifier.contains(row.deepspeed) != row.is_refused
        assert (row.deepspeed in VERSIONS) != row.is_refused


@pytest.mark.parametrize("package", PACKAGES)
def test_the_oldest_release_that_the_package_allows_is_tried(
    script: ModuleType, package: str
) -> None:
    [oldest] = [one.version for one in ranges()[package].specifier if one.operator == ">="]
    tried = {getattr(row, package) for row in script.ROWS if not row.is_refused}
    assert any(f"{release}.".startswith(f"{oldest}.") for release in tried)


def test_rows_of_one_environment_stand_together(script: ModuleType) -> None:
    names = [name for name, _ in groupby(script.ROWS, key=lambda row: row.environment)]
    assert len(names) == len(set(names))


def test_words_choose_rows(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--list", f"deepspeed-{script.REFUSED}", "torch-2.5.0"]) == 0
    printed = capsys.readouterr().out.split()
    assert [name.partition("-torch")[0] for name in printed] == [
        f"deepspeed-{script.REFUSED}",
        f"deepspeed-{script.NEWEST}",
    ]


def test_a_whole_name_chooses_its_row_alone(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [row.name for row in script.ROWS]
    [short] = (name for name in names if f"{name}-python-3.12" in names)
    assert script.main(["--list", short, "torch-2.5.0"]) == 0
    printed = capsys.readouterr().out.split()
    assert printed[0] == short
    assert ["torch-2.5.0" in name for name in printed] == [False, True]


def test_a_word_of_no_row_tries_nothing(script: ModuleType, tmp_path: Path) -> None:
    assert script.main(["--folder", str(tmp_path / "new"), "torch-1.0"]) == 1
    assert not (tmp_path / "new").exists()


def test_every_trial_is_a_test_that_there_is(script: ModuleType) -> None:
    text = "".join((ROOT / name).read_text("utf-8") for name in script.TEST_FILES)
    for test, trial in script.TRIALS.items():
        assert f"def {test}(" in text
        assert script.CASES[trial].partition(" ")[0] in test


def test_a_row_whose_python_is_missing_says_so_and_fails_nothing(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(script.shutil, "which", lambda name: None)
    assert script.main(["--folder", str(tmp_path), "python-3.14"]) == 0
    printed = capsys.readouterr().out
    assert "| 3.14 | not run | no Python 3.14 here | no Python" in printed


SHIM = 'echo "pyenv: python3.10: command not found" >&2; exit 127'


@pytest.mark.parametrize(
    ("program", "is_found"),
    [(SHIM, False), ("echo Python 3.10.4", True), ("echo Python 3.1.2", False)],
    ids=["shim", "3.10", "another"],
)
def test_a_python_is_one_that_starts(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    is_found: bool,
) -> None:
    python = tmp_path / "python3.10"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert script.find_python("3.10") == (str(python) if is_found else None)


def fails(*_: Any) -> Any:
    raise subprocess.CalledProcessError(1, "pip")


def test_a_wheel_that_cannot_be_built_is_its_rows_problem_and_leaves_the_others(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(script, "find_python", lambda version: version or "python")
    monkeypatch.setattr(script, "build_wheel", lambda _, python: python == "3.10" and fails())
    passed = script.Found({}, 0, {"training": "passed"}, [])
    monkeypatch.setattr(script, "try_row", lambda *_: passed)
    assert script.main(["--folder", str(tmp_path), "python-3.10", "python-3.12"]) == 1
    printed = capsys.readouterr().out
    assert "python-3.10: no wheel can be built" in printed
    assert "| 3.12 | not run | passed |" in printed


def test_ctrl_c_leaves_the_rows_that_are_done(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = iter([script.Found({}, 0, {"training": "passed"}, [])])
    monkeypatch.setattr(script, "build_wheel", lambda *_: WHEEL)
    monkeypatch.setattr(script, "try_row", lambda *_: next(rows, None) or interrupted())
    with pytest.raises(KeyboardInterrupt):
        script.main(["--folder", str(tmp_path), "deepspeed-0.18"])
    assert "| not run | passed |" in capsys.readouterr().out


def interrupted() -> Any:
    raise KeyboardInterrupt


# -- what comes of them ----------------------------------------------------------------------------


def test_a_refusal_has_to_come_where_it_is_expected_and_only_there(script: ModuleType) -> None:
    plain = script.ROWS[0]
    refused = replace(plain, is_refused=True)
    assert script.compare(plain, facts()) == []
    assert script.compare(refused, facts(refusal="differs")) == []
    [problem] = script.compare(plain, facts(refusal="differs in step"))
    assert "differs in step" in problem
    [problem] = script.compare(refused, facts())
    assert "a refusal" in problem


def test_whether_weights_are_loaded_our_way_has_to_be_as_expected(script: ModuleType) -> None:
    plain = script.ROWS[0]
    as_stock = replace(plain, knows_weights=False)
    assert script.compare(plain, facts(knows_weights=False))
    assert script.compare(as_stock, facts())
    assert script.compare(as_stock, facts(knows_weights=False)) == []
    assert "weights" in plain.trials
    assert "weights" not in as_stock.trials
    assert replace(plain, is_refused=True).trials == []
    assert replace(plain, only_weights=True).trials == ["weights"]


def test_what_failed_once_or_was_skipped_did_not_pass(script: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    assert script.read_report(path) == {
        "training": "passed",
        "resume": "failure",
        "weights": "skipped",
    }
    assert script.read_report(path) == {}  # the next row's is its own


class Started:
    """Stands for an environment in which a row starts and pytest writes REPORT."""

    def __init__(self, folder: Path, printed: str, status: int = 0) -> None:
        self.folder = folder
        self.printed = printed
        self.status = status

    is_ready = True

    def exchange_deepspeed(self, release: str) -> None:
        pass

    def tail(self) -> str:
        return "the end of the log"

    def python(self, *words: str) -> Any:
        for word in words:
            if word.startswith("--junitxml="):
                Path(word.partition("=")[2]).write_text(REPORT)
        return type("Done", (), {"returncode": self.status, "stdout": self.printed})


VERSIONS_FOUND = (
    '"versions": {"deepspeed": "1.2", "torch": "2.13.0+cpu", "transformers": "5", '
    '"python": "3.12.1"}'
)


def test_a_trial_that_did_not_pass_or_run_is_a_problem(script: ModuleType, tmp_path: Path) -> None:
    printed = '{"refusal": "", "knows_weights": true, "differing": [], ' + VERSIONS_FOUND + "}"
    found = script.try_row(script.ROWS[0], Started(tmp_path, f"a warning\n{printed}"), WHEEL)
    assert found.cells["training"] == "passed"
    *problems, log = found.problems
    lacking = ["two ranks: not run", "resume: failure", "early steps: not run", "weights: skipped"]
    assert problems == lacking
    assert log == "the end of the log"


def test_what_does_not_start_is_a_problem_with_the_end_of_its_log(
    script: ModuleType, tmp_path: Path
) -> None:
    found = script.try_row(script.ROWS[0], Started(tmp_path, "", status=1), WHEEL)
    [problem] = found.problems
    assert "the end of the log" in problem
    assert "| fails |" in script.table([(script.ROWS[0], found)])


@pytest.mark.parametrize("part", ["exchange_deepspeed", "python"])
def test_what_hangs_is_a_problem_with_the_end_of_its_log(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def hangs(*_: Any) -> Any:
        raise subprocess.TimeoutExpired("python", 1800)

    monkeypatch.setattr(Started, part, hangs)
    [problem] = script.try_row(script.ROWS[0], Started(tmp_path, ""), WHEEL).problems
    assert "1800" in problem
    assert "the end of the log" in problem


def test_the_table_has_what_was_installed(script: ModuleType, tmp_path: Path) -> None:
    row = replace(script.ROWS[0], deepspeed="1.2", is_refused=True)
    printed = '{"refusal": "differs", "knows_weights": true, "differing": ["a", "b"], '
    found = script.try_row(row, Started(tmp_path, printed + VERSIONS_FOUND + "}"), WHEEL)
    assert found.problems == []
    last = script.table([(row, found)]).splitlines()[-1]
    assert last.startswith("| 1.2 | 2.13.0+cpu | 5 | 3.12.1 | refused: 2 definitions differ |")


def test_rows_that_differ_in_one_release_are_one(script: ModuleType) -> None:
    text = "1 t f p armed ok|2 t f p armed ok|3 t f p armed ok|3 t g p armed ok|4 t g p armed no"
    assert script.joined(row.split() for row in text.split("|")) == [
        ["1, 2, 3", "t", "f", "p", "armed", "ok"],
        ["3", "t", "g", "p", "armed", "ok"],
        ["4", "t", "g", "p", "armed", "no"],
    ]


# -- the page --------------------------------------------------------------------------------------


def test_the_page_has_a_row_for_each(script: ModuleType) -> None:
    text = (ROOT / "docs" / "versions.md").read_text("utf-8")
    lines = re.findall(r"^\| (\d+\.\d+\.\d+[^|]* \| .*) \|$", text, re.MULTILINE)
    joined = [[cell.strip().split(", ") for cell in line.split("|")] for line in lines]
    tables = [list(cells) for row in joined for cells in itertools.product(*row)]
    for row, cells in zip(script.ROWS, tables, strict=True):
        torch = cells[1].partition("+")[0]
        assert [cells[0], torch, cells[2]] == [row.deepspeed, row.torch, row.transformers]
        assert cells[3].startswith(row.python or "3.")
        assert cells[4].startswith("refused" if row.is_refused else ("armed", "not run"))
        tried = [cell for cell in cells[5:] if cell == "passed" or cell.startswith("n")]
        assert len(tried) == len(row.trials)
