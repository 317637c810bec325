"""The checks for GPUs as far as they can be tried without one: verdicts, controls, the report."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.gpu_machine_facts import MACHINE
from tests.support.scripts import SCRIPTS, load_script

RUN: dict[str, Any] = {
    "losses": ["8.5,8.4", "8.3,8.2", "8.1,8.0", "7.9,7.8"],
    "refusals": 0,
    "weights": "ab12",
    "arena": {"reserved_bytes": 64, "registered_bytes": 64, "is_pinned": True, "notes": []},
    "cached_bytes": 0,
}
STOCK = RUN | {"arena": None, "cached_bytes": 4096}
REGISTERED = {"registered_bytes": 0, "notes": ["no context"], "intact": True}
KERNELS = {"scanned": 3, "wrong": []}
ORDER = {"intact": True, "waited_s": 1.0, "shared": True}
TRACE = {
    "least_bytes": 100,
    "copied_bytes": {"HtoD": 200, "DtoH": 50},
    "overlap_share": 0.4,
    "pageable": [],
}
REFUSALS = {
    "without a context": REGISTERED,
    "registered twice": {"code": 712, "intact": True},
    "taken back twice": {"code": 0, "held_bytes": 8, "notes": ["CUDA error 713: not registered"]},
}
FAST = {"ratio": 0.99, "lease_gb_s": 25.0, "pinned_gb_s": 25.1}
BANDWIDTH = {"to the device": FAST, "from the device": FAST, "both at once": FAST}
PARITY = {"oracle": STOCK, "again": STOCK, "ours": RUN}
SAME = {"ours": RUN, "oracle": RUN}

#: For each check figures as they should be, and changes each of which is a failure.
FIGURES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "refusals": (
        REFUSALS,
        [
            {"without a context": REGISTERED | {"registered_bytes": 8}},
            {"without a context": REGISTERED | {"notes": []}},
            {"without a context": REGISTERED | {"intact": False}},
            {"registered twice": {"code": 0, "intact": True}},
            {"taken back twice": REFUSALS["taken back twice"] | {"held_bytes": 0}},
            {"taken back twice": REFUSALS["taken back twice"] | {"notes": ["CUDA error 1: other"]}},
        ],
    ),
    "bandwidth": (BANDWIDTH, [{way: FAST | {"ratio": 0.5}} for way in BANDWIDTH]),
    "kernels": (KERNELS, [{"wrong": ["inf at 0 was not seen"]}, {"scanned": 0}]),
    "slots": (ORDER, [{"intact": False}, {"shared": False}]),
    "staging": (ORDER, [{"intact": False}]),
    "tiles": (ORDER, [{"intact": False}]),
    "registration": (
        RUN,
        [
            {"arena": None},
            {"arena": RUN["arena"] | {"registered_bytes": 60}},
            {"arena": RUN["arena"] | {"registered_bytes": 0, "reserved_bytes": 0}},
            {"arena": RUN["arena"] | {"is_pinned": False}},
        ],
    ),
    "parity-bf16": (
        PARITY,
        [
            {"ours": RUN | {"losses": [*RUN["losses"][:3], "7.9,7.80001"]}},
            {"ours": RUN | {"weights": "ab13"}},
            {"ours": STOCK},  # memascend was not there
            {"again": STOCK | {"weights": "0"}},
            {"oracle": STOCK | {"losses": ["nan,nan"] * 4}},
            dict.fromkeys(PARITY, RUN | {"losses": ["nan,nan"] * 4}),
            dict.fromkeys(PARITY, RUN | {"losses": RUN["losses"][:1]}),
        ],
    ),
    "sanitizer": (
        {"races": [], "of CPU offload": ["CSAN detected a race of a and b"]},
        [{"races": ["CSAN detected a race of a and c"]}],
    ),
    "contexts": (
        {"devices": [[0], [1]]},
        [{"devices": [[0], [0, 1]]}, {"devices": [[1], [1]]}, {"devices": [[], [1]]}],
    ),
    "tests": (
        {"passed": ["a.b"], "failed": [], "skipped": []},
        [{"passed": []}, {"failed": ["a.c"]}, {"skipped": ["a.c"]}],
    ),
    "no-caching": (
        SAME,
        [{"ours": RUN | {"cached_bytes": 1}}, {"ours": RUN | {"weights": "0"}}],
    ),
    "oom": (
        SAME | {"ours": RUN | {"refusals": 1}},
        [SAME, {"ours": RUN | {"refusals": 1, "weights": "0"}}],
    ),
    "profile": (
        TRACE,
        [
            {"pageable": [["Memcpy HtoD (Pageable -> Device)", 1 << 20]]},
            {"copied_bytes": {"HtoD": 99, "DtoH": 0}},
        ],
    ),
}
FIGURES["overlap"] = (TRACE, [{"overlap_share": 0.0}])
FIGURES |= dict.fromkeys(("parity-fp16", "nccl", "parity-streams"), FIGURES["parity-bf16"])
MEANS = RUN | {"losses": ["8.45", "8.25", "8.05", "7.85"]}
FIGURES["parity-slices"] = (
    {"oracle": STOCK, "ours": MEANS},
    [
        {"ours": MEANS | {"losses": [*MEANS["losses"][:3], "7.851"]}},
        {"ours": MEANS | {"losses": [*MEANS["losses"][:3], "nan"]}},
        {"ours": MEANS | {"weights": "ab13"}},
        {"ours": MEANS | {"arena": None}},
        {"oracle": STOCK | {"losses": RUN["losses"][:1]}, "ours": MEANS | {"losses": ["8.45"]}},
    ],
)
RIGHT, WRONG = {"right": 5, "wrong": 0}, {"right": 0, "wrong": 5}
GUESSES = {
    name: {"oracle": STOCK, "ours": RUN | {"guesses": counts}}
    for name, counts in (("right", RIGHT), ("wrong", WRONG))
}
FIGURES["guesses"] = (
    GUESSES,
    [
        {"right": {"oracle": STOCK, "ours": RUN | {"guesses": WRONG}}},
        {"wrong": {"oracle": STOCK, "ours": RUN | {"guesses": None}}},
        {"wrong": {"oracle": STOCK, "ours": RUN | {"guesses": WRONG, "weights": "0"}}},
    ],
)
FIGURES["auto"] = (
    {"oracle": STOCK, "ours": RUN | {"guesses": {"right": 3, "wrong": 1}}},
    [
        {"ours": RUN | {"guesses": WRONG}},
        {"ours": RUN | {"guesses": None}},
        {"ours": RUN | {"guesses": RIGHT, "weights": "0"}},
    ],
)
CODED = RUN | {"weights": "ab13"}
FIGURES["eight-bits"] = (
    {"fp32": RUN, "256KiB": CODED, "1MiB": CODED},
    [
        {"1MiB": CODED | {"weights": "0"}},
        {"fp32": CODED},
        {"fp32": RUN | {"losses": [*RUN["losses"][:3], "8.7,8.6"]}},
    ],
)
FIGURES["muon"] = FIGURES["parity-bf16"]

#: What controls change where that is more than the first of these.
CONTROLS: dict[str, dict[str, Any]] = {
    "refusals": {
        "without a context": REGISTERED | {"registered_bytes": 8, "notes": []},
        "registered twice": {"code": 0, "intact": True},
        "taken back twice": {"code": 0, "held_bytes": 0, "notes": []},
    },
    "bandwidth": dict.fromkeys(BANDWIDTH, FAST | {"ratio": 0.5}),
    "registration": {"arena": RUN["arena"] | {"registered_bytes": 0, "is_pinned": False}},
    "contexts": {"devices": [[0, 1], [0, 1]]},
    "tests": {"passed": [], "skipped": ["a.b"]},
}


@pytest.fixture(scope="module")
def smoke() -> ModuleType:
    return load_script("gpu_smoke")


WRONG_RUN = RUN | {"losses": [*RUN["losses"][:3], "7.7,7.6"], "weights": "0"}
PARITIES = ("parity-bf16", "parity-fp16", "parity-streams", "nccl", "muon")
CONTROLS |= {name: {"ours": WRONG_RUN} for name in PARITIES}
CONTROLS["auto"] = {"ours": WRONG_RUN | {"guesses": RIGHT}}
CONTROLS["eight-bits"] = {"1MiB": WRONG_RUN}
CONTROLS["guesses"] = {
    name: GUESSES[name] | {"ours": WRONG_RUN | {"guesses": GUESSES[name]["ours"]["guesses"]}}
    for name in GUESSES
}
CONTROLS["parity-slices"] = {"ours": WRONG_RUN | {"losses": ["8.45", "8.25", "8.05", "7.65"]}}


def control_of(name: str) -> dict[str, Any]:
    return CONTROLS.get(name, FIGURES[name][1][0])


# -- verdicts ------------------------------------------------------------------------------------


def test_every_check_is_tried_here(smoke: ModuleType) -> None:
    assert set(smoke.CHECKS) == set(FIGURES)


@pytest.mark.parametrize("name", FIGURES)
def test_a_verdict_passes_what_is_well_and_nothing_else(smoke: ModuleType, name: str) -> None:
    good, changes = FIGURES[name]
    check = smoke.CHECKS[name]
    assert check.verdict(good) == []
    for change in changes:
        assert check.verdict(good | change) != [], change


@pytest.mark.parametrize("name", FIGURES)
def test_a_check_whose_control_is_not_noticed_has_not_passed(smoke: ModuleType, name: str) -> None:
    good = FIGURES[name][0]
    check = smoke.CHECKS[name]
    assert check.problems(good, good | control_of(name)) == []
    (problem,) = check.problems(good, good)
    assert check.control in problem


@pytest.mark.parametrize("name", ["refusals", "bandwidth", "registration", "parity-bf16"])
def test_a_control_that_breaks_several_things_is_noticed_in_each(
    smoke: ModuleType, name: str
) -> None:
    good, changes = FIGURES[name]
    (problem,) = smoke.CHECKS[name].problems(good, good | changes[0])
    assert "control" in problem


# -- measurements that need no device, or an imitated one ----------------------------------------


class LateDevice:
    """A device in host memory that copies as late as it may: when somebody waits for it."""

    name, registers = "cpu", False

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._copy = torch.Tensor.copy_
        self._monkeypatch = monkeypatch
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._done = 0

    def start(self) -> None:
        pass

    def new_event(self) -> LateEvent:
        return LateEvent(self)

    def event(self) -> LateEvent:
        event = self.new_event()
        event.record()
        return event

    def issued(self) -> int:
        return self._done + len(self._pending)

    def is_done(self, count: int) -> bool:
        return self._done >= count

    def catch_up(self, count: int) -> None:
        while self._done < count:
            self._copy(*self._pending.pop(0))
            self._done += 1

    @contextmanager
    def behind_something_long(self) -> Iterator[None]:
        def later(target: torch.Tensor, source: torch.Tensor, **_: Any) -> torch.Tensor:
            self._pending.append((target, source))
            return target

        with self._monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "copy_", later)
            yield
            self.catch_up(self.issued())


class LateEvent:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._count = 0

    def record(self) -> None:
        self._count = self._device.issued()

    def query(self) -> bool:
        return self._device.is_done(self._count)

    def synchronize(self) -> None:
        self._device.catch_up(self._count)


@pytest.mark.parametrize("name", ["slots", "staging", "tiles"])
def test_a_late_device_overtakes_nothing_but_the_control(
    smoke: ModuleType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smoke.order, "DEVICE", LateDevice(monkeypatch))
    monkeypatch.setattr(smoke.order, "SLOT_BYTES", 1 << 16)
    monkeypatch.setattr(smoke.order, "NUMEL", (1 << 16) // 4)
    check = smoke.CHECKS[name]
    whole, broken = (check.measure(tmp_path, variant) for variant in (False, True))
    assert check.problems(whole, broken) == []
    assert not broken["intact"]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are not interpreted")
def test_the_interpreted_kernel_passes_and_its_control_is_noticed(
    smoke: ModuleType, tmp_path: Path
) -> None:
    sizes = (1, 1000)
    whole, broken = (
        smoke.memory.measure_kernels(tmp_path, variant, device="cpu", sizes=sizes)
        for variant in (False, True)
    )
    assert smoke.CHECKS["kernels"].problems(whole, broken) == []


@pytest.mark.deepspeed
@pytest.mark.full
def test_parity_is_seen_and_so_is_a_wrong_step(
    smoke: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smoke.training, "ACCELERATOR", "cpu")
    result, of_stock = smoke.training.result, []

    def remembered(run: Any) -> dict[str, Any]:
        """The control has the mistake in ours alone: it is compared with the same two of stock."""
        if run.block is not None:
            return result(run)
        if len(of_stock) < 2:
            of_stock.append(result(run))
        return of_stock[-1]

    monkeypatch.setattr(smoke.training, "result", remembered)
    check = smoke.CHECKS["parity-bf16"]
    whole, broken = (check.measure(tmp_path, variant) for variant in (False, True))
    assert check.problems(whole, broken) == []
    # Nothing of it lies elsewhere than in the folder.
    assert list(tmp_path.iterdir()) == []


# -- the report ----------------------------------------------------------------------------------


def record(smoke: ModuleType, folder: Path, name: str, **content: Any) -> None:
    case = smoke.case_of(smoke.CHECKS[name], 1)
    whole = {"name": name, "machine": MACHINE, **content}
    case.file(folder).write_text(json.dumps(whole))


def answers(name: str, *, noticed: bool = True) -> dict[str, Any]:
    good = FIGURES[name][0]
    broken = good | control_of(name) if noticed else good
    return {"state": "done", "answers": {"whole": good, "broken": broken}}


def test_the_report_is_one_json_and_one_page(smoke: ModuleType, tmp_path: Path) -> None:
    record(smoke, tmp_path, "slots", **answers("slots"))
    record(smoke, tmp_path, "nccl", state="not here", why="needs 2 devices, this machine has 1")
    assert smoke.main(["--render", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "gpu_smoke.json").read_text())
    assert found["machine"] == MACHINE
    assert {one["check"]: one["result"] for one in found["checks"]} == {
        "slots": "passed",
        "nccl": "not here",
    }
    text = (tmp_path / "gpu_smoke.txt").read_text()
    assert "NVIDIA H200" in text
    assert "needs 2 devices" in text
    assert "1 passed, 0 FAILED, 1 not here" in text


@pytest.mark.parametrize("how", ["control", "ended", "broken"])
def test_a_check_that_failed_is_named_with_its_reason(
    smoke: ModuleType, tmp_path: Path, how: str
) -> None:
    good, changes = FIGURES["tiles"]
    content: dict[str, Any] = {
        "control": answers("tiles", noticed=False),
        "ended": {"state": "failed", "why": "it ended with status 1:\nlibcuda says no"},
        "broken": {"state": "done", "answers": {"whole": good | changes[0], "broken": good}},
    }[how]
    record(smoke, tmp_path, "tiles", **content)
    assert smoke.main(["--render", "--out", str(tmp_path)]) == 1
    text = (tmp_path / "gpu_smoke.txt").read_text()
    expected = {"control": "not noticed", "ended": "libcuda says no", "broken": "used again"}[how]
    assert expected in text
    assert "0 passed, 1 FAILED" in text


# -- the command line ----------------------------------------------------------------------------


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPTS / "gpu_smoke.sh"), *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_without_a_device_the_script_says_so_and_ends_with_77(tmp_path: Path) -> None:
    done = run_script("--out", str(tmp_path / "out"))
    assert done.returncode == 77, done.stderr
    assert "no CUDA device" in done.stderr
    assert not (tmp_path / "out").exists()


def test_every_check_is_listed_with_what_it_lacks(smoke: ModuleType) -> None:
    done = run_script("--list")
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert list(lines) == list(smoke.CHECKS)
    assert "needs 2 devices" in lines["nccl"]


def test_a_check_is_not_here_where_its_needs_are_not(
    smoke: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smoke.training.gpu_lacks, "compiler", lambda: "needs a C++ compiler")
    why = {name: smoke.case_of(check, 8).why_not for name, check in smoke.CHECKS.items()}
    assert why["slots"] == ""
    assert why["parity-bf16"] == why["tests"] == "needs a C++ compiler"


def test_checks_without_training_come_before_all_others(smoke: ModuleType) -> None:
    names = list(smoke.CHECKS)
    assert names[:6] == ["refusals", "bandwidth", "kernels", "slots", "staging", "tiles"]
    trained = [check.name for check in (*smoke.training.CHECKS, *smoke.modes.CHECKS)]
    assert names[-len(trained) :] == trained
    assert trained[0] == "registration"


def test_an_unknown_check_is_refused() -> None:
    done = run_script("slot")
    assert done.returncode not in (0, 77)
    assert "'slot'" in done.stderr


def test_a_device_that_cannot_be_used_fails_every_check_and_is_told(
    smoke: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device here")
    machine = smoke.gpu_machine.Machine(1, 1 << 33, 1 << 33, 1 << 33, 1 << 33)
    monkeypatch.setattr(smoke.gpu_machine, "look", lambda path: machine)
    out = tmp_path / "out"
    arguments = ["slots", "--out", str(out), "--nvme-path", str(tmp_path)]
    assert smoke.main(arguments) == 1
    (found,) = json.loads((out / "gpu_smoke.json").read_text())["checks"]
    assert (found["check"], found["result"]) == ("slots", "FAILED")
    assert "cuda" in found["why"][0].lower()  # what torch said in the child
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_child_measures_the_variant_that_it_is_asked_for(
    smoke: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check = smoke.CHECKS["kernels"]
    told = dataclasses.replace(check, measure=lambda folder, broken: {"broken": broken})
    monkeypatch.setitem(smoke.CHECKS, "kernels", told)
    for variant in (smoke.WHOLE, smoke.BROKEN):
        smoke.main(["--child", "kernels", "--variant", variant, "--nvme-path", str(tmp_path)])
        answer = capsys.readouterr().out.removeprefix(smoke.cases.MARK)
        assert json.loads(answer) == {"broken": variant == smoke.BROKEN}
