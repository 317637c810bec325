"""An attachment: what it serves DeepSpeed with, what it says of a run, and how it is found."""

from __future__ import annotations

import gc
import json
import logging
import os
import platform
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from memascend.deepspeed.attach import attachment as attaching
from memascend.deepspeed.attach.attachment import ENGINE_PROPERTY, Attachment, attachment_of
from memascend.deepspeed.attach.process import limits_bytes
from memascend.deepspeed.stock.aio_handle import AioHandle, wrap_builder
from memascend.errors import StoreError
from memascend.ledger.drives import DriveReport, DriveWatch, DriveWear
from memascend.ledger.trace import Measures, Trace, read_recording
from memascend.monitor.status import read_status
from memascend.monitor.status_file import RankPlace
from memascend.plan.derive import PlanRequest, derive
from tests.support.attachments import FakeRuntime
from tests.support.plan_models import decoder
from tests.support.statuses import RUN

TB = 10**12


Make = Callable[..., Any]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Make:
    """Makes an attachment as a rank of a job would, without a process group."""
    caplog.set_level(logging.INFO, logger="memascend")

    def run(
        *,
        rank: int = 0,
        has_arena: bool = True,
        has_store: bool = True,
        drives: DriveWatch | None = None,
        trace: Trace | None = None,
        place: RankPlace | None = None,
        **block: Any,
    ) -> Attachment:
        monkeypatch.setattr(attaching.dist, "get_rank", lambda: rank)
        runtime: Any = FakeRuntime(block, has_arena=has_arena, has_store=has_store)
        return Attachment(runtime, drives, trace=trace, place=place)

    return run


@pytest.fixture
def second_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process be the second rank of its machine."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")


# -- the plan and the budget of writes -----------------------------------------------------------


@pytest.mark.parametrize(("rank", "is_said"), [(0, True), (1, False)])
def test_every_rank_adopts_the_plan_and_rank_0_says_it(
    make: Make, rank: int, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plan = derive(decoder(), request=PlanRequest())
    attachment = make(rank=rank)
    attachment.adopt(plan)
    assert attachment.runtime.adopted == [plan]
    assert ("optimizer tiles" in caplog.text) == is_said


@pytest.mark.parametrize(
    ("over_budget", "after"), [("stop", "stops after the next checkpoint"), ("warn", "continues")]
)
def test_a_budget_that_is_exceeded_is_said_once_with_what_comes_of_it(
    make: Make, over_budget: str, after: str, caplog: pytest.LogCaptureFixture
) -> None:
    attachment = make(wear={"write_budget": 15, "over_budget": over_budget})
    attachment.note_step()
    assert caplog.records == []
    assert not attachment.is_to_stop()
    attachment.note_step()
    attachment.note_step()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "memascend.wear.write_budget" in record.getMessage()
    assert after in record.getMessage()
    assert attachment.is_to_stop() == (over_budget == "stop")


def test_other_ranks_say_nothing_of_the_budget_and_stop_all_the_same(
    make: Make, second_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    attachment = make(rank=1, wear={"write_budget": 5, "over_budget": "stop"})
    attachment.note_step()
    assert caplog.records == []
    assert attachment.is_to_stop()


def test_without_a_store_nothing_is_over_the_budget(make: Make) -> None:
    attachment = make(has_store=False, wear={"write_budget": 5, "over_budget": "stop"})
    attachment.note_step()
    assert not attachment.is_to_stop()


# -- the report ----------------------------------------------------------------------------------


def test_a_report_is_written_once_and_by_rank_0_alone(
    make: Make, second_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "ledger.json"
    make(rank=1, report=str(report)).finish()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("LOCAL_RANK", "0")
    attachment = make(report=str(report))
    attachment.finish()
    assert json.loads(report.read_text())["limit_bytes"] is None
    attachment.finish()
    assert attachment.runtime.ledger_count == 1
    attachment.begin()  # another engine trains the model
    attachment.finish()
    assert attachment.runtime.ledger_count == 2


@pytest.mark.parametrize(
    ("rank", "local", "speaks"),
    [(0, 0, True), (1, 1, False), (2, 0, True), (3, 1, False)],
)
def test_the_first_rank_of_every_machine_tells_of_its_drives(
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rank: int,
    local: int,
    speaks: bool,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(local))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    make(rank=rank, report=str(tmp_path / "ledger.json")).finish()
    written = [path.name for path in tmp_path.iterdir()]
    assert written == ([f"ledger.rank{rank}.json" if rank else "ledger.json"] if speaks else [])
    assert ("host memory of" in caplog.text) == speaks
    if rank and speaks:
        assert f"rank {rank}, the first on {platform.node()}" in caplog.text
        assert json.loads((tmp_path / written[0]).read_text())["machine"] == platform.node()


def test_a_report_that_cannot_be_written_any_more_is_logged(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = str(tmp_path / "gone" / "ledger.json")
    make(report=report).finish()
    (error,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert f"memascend.report={report!r}: No such file or directory" in error.getMessage()
    assert "not ours: Python, torch, DeepSpeed" in caplog.text


def test_a_second_model_of_the_process_writes_a_report_beside_the_firsts(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    models = [make(report="ledger.json") for _ in range(2)]
    make(rank=1, report="ledger.json")
    monkeypatch.chdir("/")  # as some scripts do
    for model in reversed(models):  # as at the end of a program
        model.finish()
        assert json.loads((tmp_path / model._report.name).read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ledger-2.json", "ledger.json"]
    assert f"will be in {tmp_path / 'ledger-2.json'}" in caplog.text


def test_a_model_that_is_through_no_longer_counts_for_the_others(make: Make) -> None:
    before = limits_bytes()
    attachment = make(rank=1)
    assert limits_bytes() - before == 5
    attachment.finish()
    assert limits_bytes() == before


def test_an_error_of_the_last_step_that_nobody_asked_for_is_logged(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    attachment = make()

    def fail(_: Any) -> None:
        raise StoreError(5, "the drive is gone")

    attachment.runtime.background.start([fail], {}, lambda: None)
    attachment.finish()
    (error,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "checkpoint" in error.getMessage()
    assert "the drive is gone" in caplog.text


def test_drives_are_read_at_the_start_and_at_the_end(make: Make) -> None:
    drives = [(DriveWear("a", "", 4, TB),), (DriveWear("a", "", 4, 2 * TB),)]
    watch = DriveWatch(["/x"], read=lambda paths: DriveReport(drives.pop(0)))
    attachment = make(drives=watch)
    assert attachment.ledger().drives[0].run_written_bytes is None
    assert len(drives) == 1
    attachment.finish()
    assert attachment.ledger().drives[0].run_written_bytes == TB
    attachment.finish()
    assert drives == []


def test_a_script_that_just_ends_gets_its_report_and_nothing_is_kept_alive_for_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[Any] = []
    monkeypatch.setattr(attaching.atexit, "register", lambda *call: at_exit.append(call))
    kept, dropped = make(), make()
    alive = weakref.ref(dropped)
    del dropped
    gc.collect()
    assert alive() is None
    with monkeypatch.context() as forked:
        forked.setattr(attaching.os, "getpid", lambda: 0)
        for function, *arguments in at_exit:
            function(*arguments)
    assert kept.runtime.ledger_count == 0
    for function, *arguments in at_exit:
        function(*arguments)
    assert kept.runtime.ledger_count == 1


# -- the status ----------------------------------------------------------------------------------


def test_the_status_has_the_account_and_ends_with_the_run_on_every_rank(
    make: Make, tmp_path: Path
) -> None:
    place = RankPlace(tmp_path, True, RUN, rank=1, world_size=2, program="train.py")
    attachment = make(rank=1, place=place)
    assert attachment.status is not None
    attachment.status.begin_step()
    assert read_status(place.path).ledger.limit_bytes is None
    attachment.finish()
    assert read_status(place.path).is_finished


def test_a_rank_that_an_error_has_ended_is_not_through(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attachment = make(place=RankPlace(tmp_path, True, RUN, 0, 1, "train.py"))
    assert attachment.status is not None
    attachment.status.begin_step()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "last_type", ValueError, raising=False)
        attaching._finish(weakref.ref(attachment), os.getpid())
    assert not read_status(attachment.status.place.path).is_finished
    assert attachment.runtime.ledger_count == 2  # the account is given all the same
    attaching._finish(weakref.ref(attachment), os.getpid())
    assert read_status(attachment.status.place.path).is_finished


def test_the_status_keeps_no_attachment_alive(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    attachment = make(place=RankPlace(tmp_path, True, RUN, 0, 1, "train.py"))
    status, alive = attachment.status, weakref.ref(attachment)
    del attachment
    gc.collect()
    assert alive() is None
    status.begin_step()
    assert "the model is gone" in caplog.text


# -- what DeepSpeed is served with ---------------------------------------------------------------


def test_host_buffers_come_from_the_arena_under_their_component(make: Make) -> None:
    attachment = make()
    with attachment.host_buffers("gradients"):
        torch.zeros(100_000)
        with attachment.host_buffers(None):
            torch.zeros(100_000)
    assert attachment.runtime.memory.taken == [("gradients", 400_000)]


def test_without_the_arena_host_buffers_are_torchs(make: Make) -> None:
    attachment = make(has_arena=False)
    with attachment.host_buffers("gradients"):
        torch.zeros(100_000)
    assert attachment.runtime.memory.taken == []


@pytest.mark.parametrize("has_store", [True, False])
def test_deepspeeds_swappers_get_handles_over_our_store_if_there_is_one(
    make: Make, has_store: bool
) -> None:
    attachment = make(has_store=has_store)
    builder = wrap_builder(lambda: SimpleNamespace(load=lambda: "stock"))
    with attachment.serving_aio("optimizer buffers"):
        served = builder().load()
    assert builder().load() == "stock"
    if not has_store:
        assert served == "stock"
        return
    handle = served.aio_handle(block_size=4096)
    assert isinstance(handle, AioHandle)
    handle.new_cpu_locked_tensor(5, torch.empty(0))
    assert attachment.runtime.memory.taken == [("optimizer buffers", 20)]


def test_staging_folders_of_two_runs_on_one_drive_differ(make: Make, tmp_path: Path) -> None:
    drive = tmp_path / "drive"  # is made
    folders = {make().staging_folder(str(drive)) for _ in range(2)}
    assert len(folders) == 2
    assert {Path(folder) for folder in folders} == set(drive.iterdir())


def test_without_our_store_the_staging_folder_is_stocks(make: Make, tmp_path: Path) -> None:
    attachment = make(has_store=False)
    assert attachment.staging_folder(str(tmp_path)) == str(tmp_path / "zero_stage_3")
    assert list(tmp_path.iterdir()) == []


# -- how it is found -----------------------------------------------------------------------------


def engine(optimizer: Any, **swappers: Any) -> Any:
    """An engine whose model has a weight with a swapper, and a bias with another or none."""
    module = torch.nn.Linear(2, 2)
    for name, swapper in swappers.items():
        getattr(module, name).nvme_swapper = swapper
    return SimpleNamespace(optimizer=optimizer, module=module)


def test_an_engine_has_the_attachment_of_its_optimizer_or_else_of_a_parameter(make: Make) -> None:
    ours, other = make(), make()
    ours_on_drive = SimpleNamespace(memascend_attachment=ours)
    assert attachment_of(engine(SimpleNamespace(attachment=ours))) is ours
    both = engine(SimpleNamespace(attachment=other), weight=ours_on_drive)
    assert attachment_of(both) is other
    assert attachment_of(engine(None, bias=ours_on_drive)) is ours
    stock = SimpleNamespace(attachment="of somebody else")
    assert attachment_of(engine(stock, weight=SimpleNamespace(), bias=ours_on_drive)) is ours


def test_an_engine_without_a_block_has_none(make: Make) -> None:
    assert attachment_of(engine(None)) is None
    assert attachment_of(engine(SimpleNamespace(), weight=SimpleNamespace())) is None


def test_the_property_on_the_engine_class_finds_it(make: Make) -> None:
    ours = make()
    kind = type("Engine", (), {"memascend": ENGINE_PROPERTY})
    found = kind()
    found.__dict__.update(vars(engine(SimpleNamespace(attachment=ours))))
    assert found.memascend is ours


def test_the_ledger_has_the_peak_of_a_device_that_is_not_the_cpu(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    attachment = make()
    assert attachment.ledger().device_bytes_peak is None
    device = SimpleNamespace(is_synchronized_device=lambda: False, max_memory_allocated=lambda: 7)
    monkeypatch.setattr(attaching, "get_accelerator", lambda: device)
    assert attachment.ledger().device_bytes_peak == 7


def test_a_trace_has_the_plan_the_phases_and_the_account_at_the_end(
    make: Make, tmp_path: Path
) -> None:
    attachment = make(trace=Trace(tmp_path, Measures))
    attachment.adopt(derive(decoder(), request=PlanRequest()))
    with attachment.phase("forward"):
        pass
    attachment.finish()
    found = read_recording(tmp_path)
    assert [mark.phase for mark in found.marks] == ["setup"] * 4 + ["forward", "backward"]
    assert found.ledger["held_bytes"] == 0
    with make().phase("forward"):
        pass  # which nobody traces
