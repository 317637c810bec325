"""Programs with cases: what is run, what is left for the next time, and what a child leaves."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import cases
import pytest

from tests.support.benchmarks import BENCHMARKS

#: Answers, fails, or never ends; every child notes that it ran.
PROGRAM = """
import os, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, {benchmarks!r})
import cases
options = cases.parser("a program", out="out").parse_args()
with Path({ran!r}).open("a") as file:
    print(options.child, options.variant, file=file)
if options.child == "fails":
    sys.exit("the reason")
if options.child == "lacks":
    def lacking():
        raise cases.Lack("no second thing")
    cases.answer(lacking)
    sys.exit()
if options.child == "hangs":
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path({pid!r}).write_text(str(helper.pid))
    time.sleep(600)
(options.nvme_path / "left behind").touch()
cases.answer(lambda: {{"variant": options.variant, "arguments": sys.argv[1:3]}})
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    ran, pid = str(tmp_path / "ran"), str(tmp_path / "pid")
    path.write_text(PROGRAM.format(benchmarks=str(BENCHMARKS), ran=ran, pid=pid))
    return path


def run(program: Path, *some: cases.Case, arguments: tuple[str, ...] = ()) -> bool:
    folder = program.parent
    words = ["--out", str(folder / "out"), "--nvme-path", str(folder), *arguments]
    options = cases.parser("a program", out="out").parse_args(words)
    return cases.run(some, program, options, {"gpus": 1})


def record(program: Path, case: cases.Case) -> dict[str, Any]:
    found = cases.load(case, program.parent / "out")
    assert found is not None
    return found


def ran(program: Path) -> list[str]:
    return [line.strip() for line in (program.parent / "ran").read_text().splitlines()]


@pytest.fixture
def hanging_ends_time(program: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Has a run's time be up when the case that never ends has started; what each child was given.

    However long that takes.
    """
    wait, started = subprocess.Popen.wait, program.parent / "pid"
    given: list[float] = []

    def wait_until_it_hangs(child: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is not None:
            given.append(timeout)
        while timeout is not None:
            if started.exists() and started.read_text():
                raise subprocess.TimeoutExpired(child.args, timeout)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return wait(child, 0.05)
        return wait(child)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_until_it_hangs)
    return given


def test_every_variant_is_answered_by_a_child_of_its_own(program: Path) -> None:
    case = cases.Case("a/b", variants=("whole", "broken"))
    assert run(program, case)
    found = record(program, case)
    assert found["state"] == cases.DONE
    assert found["machine"] == {"gpus": 1}
    assert [one["variant"] for one in found["answers"].values()] == ["whole", "broken"]
    assert ran(program) == ["a/b whole", "a/b broken"]
    assert sorted(path.name for path in program.parent.iterdir()) == ["out", "program.py", "ran"]


def test_what_is_done_or_failed_is_not_run_again_unless_asked(program: Path) -> None:
    both = (cases.Case("fine"), cases.Case("fails"))
    for _ in range(2):
        assert run(program, *both)
        assert ran(program) == ["fine", "fails"]
    assert "the reason" in record(program, both[1])["why"]
    assert run(program, *both, arguments=("--again",))
    assert ran(program) == ["fine", "fails"] * 2


def test_what_a_machine_lacked_is_looked_at_again(program: Path) -> None:
    assert run(program, cases.Case("later", "needs 2 devices"))
    assert record(program, cases.Case("later"))["state"] == cases.NOT_HERE
    assert run(program, cases.Case("later"))
    assert record(program, cases.Case("later"))["state"] == cases.DONE


@pytest.mark.usefixtures("hanging_ends_time")
def test_a_case_that_had_all_the_time_fails_and_nothing_of_it_lives_on(program: Path) -> None:
    case = cases.Case("hangs")
    assert run(program, case, cases.Case("next")) is False
    assert record(program, case)["state"] == cases.FAILED
    assert not (program.parent / "out" / "next.json").exists()
    pid = int((program.parent / "pid").read_text())
    deadline = time.monotonic() + 30
    while (status := Path(f"/proc/{pid}/stat")).exists() and " Z " not in status.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_case_that_is_cut_off_is_left_for_the_next_time(
    program: Path, hanging_ends_time: list[float]
) -> None:
    both = (cases.Case("fine"), cases.Case("hangs"))
    assert run(program, *both, arguments=("--minutes", "5")) is False
    whole, rest = hanging_ends_time
    assert 300 >= whole > rest > 0
    assert record(program, both[0])["state"] == cases.DONE
    assert not both[1].file(program.parent / "out").exists()


def test_names_choose_with_signs_as_in_a_shell_and_unknown_ones_are_refused() -> None:
    all_of_them = [cases.Case(name) for name in ("a/x", "a/y", "b/x")]
    assert cases.chosen(all_of_them, []) == all_of_them
    assert [one.name for one in cases.chosen(all_of_them, ["b/x", "a/*"])] == ["a/x", "a/y", "b/x"]
    with pytest.raises(SystemExit, match="'c'"):
        cases.chosen(all_of_them, ["a/*", "c"])


def test_a_lack_that_a_child_finds_is_no_failure_and_not_looked_for_again(program: Path) -> None:
    case = cases.Case("lacks", variants=("whole", "broken"))
    for _ in range(2):
        assert run(program, case)
        assert ran(program) == ["lacks whole"]
    found = record(program, case)
    assert (found["state"], found["why"]) == (cases.NOT_HERE, "no second thing")
    assert run(program, case, arguments=("--again",))
    assert ran(program) == ["lacks whole"] * 2


def test_a_case_does_not_begin_with_less_time_left_than_it_takes(program: Path) -> None:
    some = (cases.Case("a"), cases.Case("long", seconds=3600), cases.Case("b", seconds=1))
    assert run(program, *some, arguments=("--minutes", "30")) is False
    assert ran(program) == ["a", "b"]
    # A call begins it all the same, as it would never run otherwise; but not if that call has less.
    assert run(program, *some, arguments=("--minutes", "30", "--spent", "900")) is False
    assert run(program, *some, arguments=("--minutes", "30")) is True
    assert ran(program) == ["a", "b", "long"]


def test_a_machine_goes_on_from_one_file_of_another(program: Path) -> None:
    results = program.parent / "results.json"
    some = (cases.Case("a/x"), cases.Case("fails"))
    assert run(program, *some, arguments=("--results", str(results)))
    assert set(json.loads(results.read_text())["records"]) == {"a--x.json", "fails.json"}
    (program.parent / "out").rename(program.parent / "gone")
    words = ["--results", str(results), "--out", str(program.parent / "out")]
    options = cases.parser("a program", out="out").parse_args(words)
    cases.unpack(options)
    assert record(program, some[0])["answers"][""]["variant"] == ""
    assert run(program, *some, cases.Case("b"), arguments=("--results", str(results)))
    assert ran(program) == ["a/x", "fails", "b"]
    cases.pack(options, "a page\nof text\n")
    found = json.loads(results.read_text())
    assert found["page"] == ["a page", "of text"]
    assert set(found["records"]) == {"a--x.json", "b.json", "fails.json"}


def test_a_file_of_results_reaches_no_other_folder(program: Path) -> None:
    results = program.parent / "results.json"
    results.write_text(json.dumps({"page": [], "records": {"../../evil.json": {"state": "done"}}}))
    out = program.parent / "below" / "out"
    words = ["--results", str(results), "--out", str(out)]
    cases.unpack(cases.parser("a program", out="out").parse_args(words))
    assert [path.name for path in out.iterdir()] == ["evil.json"]


def test_named_cases_come_first_in_their_order() -> None:
    some = [cases.Case(name) for name in ("a/x", "a/y", "b/x", "c")]
    assert [one.name for one in cases.chosen(some, [], "c,a/*")] == ["c", "a/x", "a/y", "b/x"]
    assert [one.name for one in cases.chosen(some, ["b/*", "c"], "c")] == ["c", "b/x"]
    with pytest.raises(SystemExit, match="'d'"):
        cases.chosen(some, [], "c,d")


def test_a_list_says_where_each_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some = [cases.Case("done"), cases.Case("open"), cases.Case("not", "needs 2 devices")]
    some.append(cases.Case("found"))
    some[0].file(tmp_path).write_text(json.dumps({"state": cases.DONE}))
    lack = {"state": cases.NOT_HERE, "why": "no such thing", "answers": {}}
    some[3].file(tmp_path).write_text(json.dumps(lack))
    cases.show(some, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "done: done",
        "open: to do",
        "not: not here: needs 2 devices",
        "found: not here: no such thing",
    ]


@pytest.mark.parametrize(
    ("is_all", "is_well", "expected"),
    [(True, True, 0), (True, False, 1), (False, True, 75), (False, False, 75)],
)
def test_a_failure_is_told_when_nothing_is_left(is_all: bool, is_well: bool, expected: int) -> None:
    assert cases.status(is_all=is_all, is_well=is_well) == expected
