"""Checks for GPUs whose runs are not started: what each control breaks, and what is a lack."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from memascend.config.block import parse_block
from tests.support.scripts import load_script


@pytest.fixture(scope="module")
def smoke() -> ModuleType:
    return load_script("gpu_smoke")


class Ran:
    """A run that is over: nothing is started."""

    def __init__(self, trainee: Any, *, printed: Sequence[str] = (), ends: bool = False) -> None:
        self.config, self.block, self.printed = trainee.config, trainee.block, list(printed)
        self.commands: list[str] = []
        self._ends = ends

    def __enter__(self) -> Ran:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def step(self) -> None:
        self.ask("step 1", "step")

    def ask(self, command: str, event: str) -> dict[str, Any]:
        self.commands.append(command)
        if self._ends:
            raise RuntimeError("the run ended")
        return {"devices": [[0], [1]]}


@pytest.fixture
def runs(smoke: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Ran]:
    """Have no run started, and every driver register memory; the runs that would have been."""
    begun: list[Ran] = []
    start = smoke.training.start

    def start_none(folder: Path, **options: Any) -> Ran:
        begun.append(Ran(start(folder, **options)))
        return begun[-1]

    monkeypatch.setattr(smoke.training, "start", start_none)
    monkeypatch.setattr(smoke.training, "require_registration", lambda: None)
    return begun


@pytest.mark.parametrize(
    ("name", "pinned", "overlaps"), [("profile", False, True), ("overlap", True, False)]
)
def test_a_trace_is_broken_in_one_thing(
    smoke: ModuleType,
    runs: list[Ran],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    pinned: bool,
    overlaps: bool,
) -> None:
    monkeypatch.setattr(smoke.training.device_trace, "read", lambda path: {})
    for broken in (False, True):
        smoke.CHECKS[name].measure(tmp_path, broken)
    found = [
        (zero["offload_param"]["pin_memory"], zero["overlap_comm"])
        for zero in (run.config["zero_optimization"] for run in runs)
    ]
    assert found == [(True, True), (pinned, overlaps)]


def test_a_profiler_that_sees_no_device_is_a_lack(
    smoke: ModuleType, runs: list[Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path) -> None:
        raise smoke.training.device_trace.NoKernels("the trace has no kernel")

    monkeypatch.setattr(smoke.training.device_trace, "read", read)
    with pytest.raises(smoke.cases.Lack, match="no kernel"):
        smoke.CHECKS["overlap"].measure(tmp_path, False)


def test_contexts_are_counted_after_steps_that_use_every_thread(
    smoke: ModuleType, runs: list[Ran], tmp_path: Path
) -> None:
    check = smoke.CHECKS["contexts"]
    assert check.verdict(check.measure(tmp_path, False)) == []
    check.measure(tmp_path, True)
    (whole, broken) = runs
    assert whole.commands == ["step 1"] * smoke.training.STEPS + ["contexts"]
    assert broken.commands[-1] == "contexts everywhere"
    assert whole.block["streaming"]["optimizer"]["during_backward"]
    assert whole.config["gradient_clipping"] == 0  # or no step begins during backward
    assert parse_block(whole.block).activations.enabled


#: As torch's sanitizer prints it, with the addresses of one run.
RACE = """\
============================
CSAN detected a possible data race on tensor with data pointer 139719969079{0}
Access by stream 946464354608{0} during kernel:
aten::add.Tensor(Tensor self, Tensor other) -> Tensor
reading from argument(s) self
With stack trace:
  File "somewhere.py", line 1, in step
Previous access by stream 0 during kernel:
{1}
writing to argument(s) out, and to the output
""".format


def test_a_race_is_known_again_by_its_kernels(smoke: ModuleType) -> None:
    logs = [RACE(address, "aten::copy_").splitlines() for address in (11, 22)]
    first, second = (smoke.training.races_in(log) for log in logs)
    assert first == second
    assert "aten::add.Tensor" in first[0]
    assert "aten::copy_" in first[0]
    assert smoke.training.races_in([*logs[0], *logs[1]]) == first
    assert smoke.training.races_in(RACE(11, "aten::mul").splitlines()) != first
    assert smoke.training.races_in(["no race"]) == []


@pytest.mark.parametrize("theirs", ["aten::copy_", "aten::mul", None])
def test_a_race_of_cpu_offload_is_not_blamed_on_us(
    smoke: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: str | None
) -> None:
    start, check = smoke.training.start, smoke.CHECKS["sanitizer"]
    printed = {"nvme": RACE(11, "aten::copy_"), "cpu": RACE(22, theirs) if theirs else ""}

    def start_none(folder: Path, *, offload: str = "nvme", **options: Any) -> Ran:
        trainee = start(folder, offload=offload, **options)
        lines = printed[offload].splitlines()
        return Ran(trainee, printed=lines, ends=bool(lines))

    monkeypatch.setattr(smoke.training, "start", start_none)
    if theirs == "aten::copy_":  # the same race: nothing behind it was seen
        with pytest.raises(smoke.cases.Lack, match="same race"):
            check.measure(tmp_path, False)
        return
    assert len(check.verdict(check.measure(tmp_path, False))) == 1
    assert len(check.verdict(check.measure(tmp_path, True))) == 1  # one run: the control


def test_a_run_that_ends_without_a_race_is_an_error(
    smoke: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = smoke.training.start
    monkeypatch.setattr(
        smoke.training, "start", lambda folder, **options: Ran(start(folder, **options), ends=True)
    )
    with pytest.raises(RuntimeError, match="ended"):
        smoke.CHECKS["sanitizer"].measure(tmp_path, False)


@pytest.mark.parametrize("code", [0, 801])
def test_a_driver_that_registers_no_memory_is_a_lack(
    smoke: ModuleType, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    taken_back: list[int] = []
    driver = SimpleNamespace(
        cuMemHostRegister_v2=lambda *_: code,
        cuMemHostUnregister=lambda address: taken_back.append(address.value),
    )
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device="cpu", **more: zeros(*sizes, **more))
    monkeypatch.setattr(smoke.memory.ctypes, "CDLL", lambda name: driver)
    if code == 0:
        smoke.memory.require_registration()
        assert len(taken_back) == 1
    else:
        with pytest.raises(smoke.cases.Lack, match="801"):
            smoke.memory.require_registration()


#: One test of a device, whose presence a variable stands for, and one that is none of these.
TESTS = """
import os, pytest
@pytest.mark.gpu
@pytest.mark.skipif(not os.environ["CUDA_VISIBLE_DEVICES"], reason="no device")
def test_a():
    assert "TRITON_INTERPRET" not in os.environ
def test_b():
    assert False
"""


def test_the_tests_of_a_device_are_all_skipped_without_one(
    smoke: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = tmp_path / "test_device.py"
    tests.write_text(TESTS)
    (tmp_path / "pytest.ini").touch()  # names begin below it, wherever this clone lies
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(smoke.suite, "FOLDERS", (str(tests),))
    whole, broken = (smoke.suite.measure_tests(tmp_path, variant) for variant in (False, True))
    assert whole == {"passed": ["test_device.test_a"], "failed": [], "skipped": []}
    assert broken == {"passed": [], "failed": [], "skipped": ["test_device.test_a"]}
    assert smoke.CHECKS["tests"].problems(whole, broken) == []


def test_tests_that_cannot_start_are_an_error(
    smoke: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smoke.suite, "FOLDERS", ("--no-such-option",))
    with pytest.raises(RuntimeError, match="no-such-option"):
        smoke.suite.measure_tests(tmp_path, False)


def test_a_report_of_pytest_is_read_by_outcome(smoke: ModuleType, tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a" name="b"/>'
        '<testcase classname="a" name="c"><failure/></testcase>'
        '<testcase classname="a" name="d"><error/></testcase>'
        '<testcase classname="a" name="e"><skipped/></testcase></testsuite></testsuites>'
    )
    found = smoke.suite.outcomes(report)
    assert found == {"passed": ["a.b"], "failed": ["a.c", "a.d"], "skipped": ["a.e"]}


def test_muons_rates_are_wrong_in_its_control_alone(
    smoke: ModuleType, runs: list[Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[dict[str, Any]] = []
    monkeypatch.setattr(smoke.modes, "start", smoke.training.start)
    monkeypatch.setattr(
        smoke.modes, "result", lambda run: begun.append(run.config["optimizer"]["params"])
    )
    for broken in (False, True):
        smoke.CHECKS["muon"].measure(tmp_path, broken)
    whole, broken_runs = begun[:3], begun[3:]
    assert whole[0] == whole[1] == whole[2] == broken_runs[0]
    assert sum(one != whole[0] for one in broken_runs) == 1
