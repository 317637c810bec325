"""DeepSpeed's own tests, with stock and with the block: which files, what counts, and Ctrl-C."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.scripts import load_script

REPORT = """<testsuites><testsuite>
<testcase classname="unit.zero.TestGet" name="test_it[nvme]"/>
<testcase classname="unit.zero.TestGet" name="test_it[none]">
<skipped message="no fp16"/></testcase>
<testcase classname="unit.zero.TestSet" name="test_it">
<failure message="KeyError: 1&#10;more"/></testcase>
</testsuite></testsuites>"""
#: DeepSpeed's tests end pytest when one hangs: that one has no name.
REPORT_OF_A_HANG = """<testsuites><testsuite>
<testcase classname="unit.zero.TestGet" name="test_it"/>
<testcase time="0.008"/></testsuite></testsuites>"""
PASSED, SKIPPED, FAILED = ("passed", ""), ("skipped", "no fp16"), ("failed", "KeyError: 1")
#: Prints the number of a process of its own, and waits for it.
HANG = "import subprocess as s; p = s.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("deepspeed_tests")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout with one test that trains on a drive, and two that do not."""
    unit = tmp_path / "checkout" / "tests" / "unit"
    (unit / "zero").mkdir(parents=True)
    (unit / "common.py").write_text("", encoding="utf-8")
    texts = {
        "zero/test_drive.py": '{"zero_optimization": OffloadDeviceEnum.NVMe}',
        "test_zero.py": '{"zero_optimization": {"stage": 2}}',
        "test_aio.py": "the nvme operator alone",
    }
    for name, text in texts.items():
        (unit / name).write_text(text, encoding="utf-8")
    return tmp_path / "checkout"


def test_only_files_that_configure_nvme_offload_are_run(
    script: ModuleType, checkout: Path, tmp_path: Path
) -> None:
    tests = script.copy_tests(str(checkout), None, tmp_path / "run")
    assert script.selected_files(tests) == ["unit/zero/test_drive.py"]


def test_a_copy_leaves_other_files_of_its_folder_alone(
    script: ModuleType, checkout: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine").write_text("", encoding="utf-8")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "old").write_text("", encoding="utf-8")
    tests = script.copy_tests(str(checkout), None, tmp_path)
    assert (tmp_path / "mine").exists()
    assert not (tests / "old").exists()


def test_the_tests_of_a_release_are_cloned(
    script: ModuleType, checkout: Path, tmp_path: Path
) -> None:
    git = ["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"], ["tag", "v1"]):
        subprocess.run([*git, *words], check=True)
    tests = script.copy_tests(str(checkout), "v1", tmp_path / "run")
    assert script.selected_files(tests) == ["unit/zero/test_drive.py"]


def test_a_report_says_how_each_test_ended(script: ModuleType, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    assert script.read_report(report) == {}
    report.write_text(REPORT, encoding="utf-8")
    assert script.read_report(report) == {
        "unit.zero.TestGet::test_it[nvme]": PASSED,
        "unit.zero.TestGet::test_it[none]": SKIPPED,
        "unit.zero.TestSet::test_it": FAILED,
    }


def test_a_report_leaves_out_a_test_that_hung(script: ModuleType, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT_OF_A_HANG, encoding="utf-8")
    assert script.read_report(report) == {"unit.zero.TestGet::test_it": PASSED}


def test_a_table_counts_endings_and_notes_name_what_differs(script: ModuleType) -> None:
    results = {
        "stock": {"A::a": PASSED, "A::b": SKIPPED, "A::c": SKIPPED, "B::a": FAILED},
        "block": {"A::a": PASSED, "A::b": SKIPPED, "A::c": SKIPPED, "B::a": PASSED, "B::b": PASSED},
    }
    assert script.table(results).splitlines()[2:] == [
        "| A | 1 passed, 2 skipped | 1 passed, 2 skipped |",
        "| B | 1 failed, 1 not run | 2 passed |",
    ]
    assert script.notes(results) == [
        "2 x stock skipped no fp16; block skipped no fp16",
        "1 x stock failed KeyError: 1; block passed B::a",
        "1 x stock not run; block passed B::b",
    ]


@pytest.mark.parametrize(
    ("stock", "block", "status"),
    [(PASSED, PASSED, 0), (FAILED, PASSED, 1), (PASSED, SKIPPED, 1), (PASSED, None, 1)],
    ids=["alike", "nothing to compare with", "skipped with the block", "hung with the block"],
)
def test_the_status_is_0_when_the_block_passes_what_stock_passes(
    script: ModuleType,
    checkout: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stock: tuple[str, str],
    block: tuple[str, str] | None,
    status: int,
) -> None:
    ends = {"stock": stock, "block": block}

    def run(name: str, *_: object) -> dict[str, tuple[str, str]]:
        end = ends[name]
        return {} if end is None else {"A::a": end}

    monkeypatch.setattr(script, "compile_all", lambda: None)
    monkeypatch.setattr(script, "run_tests", run)
    assert script.main([str(checkout), "--folder", str(tmp_path / "run")]) == status


def interrupt(script: ModuleType, folder: Path, child: list[int]) -> None:
    """Be interrupted while a program runs, whose child is noted with a descriptor of it."""
    with script.started([sys.executable, "-c", HANG], folder, {}) as lines:
        child.append(os.pidfd_open(int(next(iter(lines)))))
        raise KeyboardInterrupt


def test_an_interrupt_leaves_no_process_behind(script: ModuleType, tmp_path: Path) -> None:
    child: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        interrupt(script, tmp_path, child)
    with os.fdopen(child[0]) as ended:
        assert select.select([ended], [], [], 60)[0]
