"""The engine's forward pass and step are noted, and run as they would without."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("deepspeed")
import torch

from memascend.deepspeed.attach import attachment as attaching
from memascend.deepspeed.monitor import engine as module
from memascend.monitor.status import Status, read_status
from memascend.monitor.status_file import RankPlace, StatusFile
from tests.support.statuses import RUN, ledger

pytestmark = pytest.mark.deepspeed


class Attachment:
    """What the wrappers ask of one."""

    def __init__(self, status: StatusFile | None) -> None:
        self.status = status
        self.phases: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.phases.append(f"{name} begins")
        try:
            yield
        finally:
            self.phases.append(f"{name} ends")


class Monitor:
    """DeepSpeed's, as the JSON has it."""

    def __init__(self, *, enabled: bool = False) -> None:
        self.enabled = enabled
        self.events: list[tuple[str, float, int]] = []

    def write_events(self, events: list[tuple[str, float, int]]) -> None:
        self.events += events


class Engine:
    """Steps its optimizer at every second micro-batch."""

    def __init__(self, optimizer: Any, schedule: Any = None) -> None:
        self.optimizer, self.lr_scheduler = optimizer, schedule
        self.global_steps = self.global_samples = self.micro_steps = self.global_rank = 0
        self.monitor = Monitor()

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.micro_steps % 2 == 1

    def forward(self, *inputs: Any, **keywords: Any) -> str:
        with module.watching_forward(self, inputs, keywords):
            return "loss"

    def _step(self, lr_kwargs: Any = None) -> str:
        self.micro_steps += 1
        if self.micro_steps % 2 == 0:
            self.global_steps += 1
            self.global_samples += 12
        return f"stepped {lr_kwargs}"

    step = module.wrap_step(_step)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attaching, "Attachment", Attachment)
    monkeypatch.setattr(module.dist, "get_world_size", lambda: 4)


@pytest.fixture
def status_file(tmp_path: Path) -> StatusFile:
    return StatusFile(RankPlace(tmp_path, True, RUN, 0, 1, "train.py"), ledger)


def training(status_file: StatusFile, schedule: Any = None) -> Engine:
    return Engine(SimpleNamespace(attachment=Attachment(status_file)), schedule)


def told(status_file: StatusFile) -> Status:
    status_file.finish()
    return read_status(status_file.place.path)


def ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def test_a_step_is_over_with_that_of_the_optimizer(status_file: StatusFile) -> None:
    engine = training(status_file)
    for micro_step in range(3):
        assert engine.forward(input_ids=ids(2, 8)) == "loss"
        assert engine.step(lr_kwargs=7) == "stepped 7"
        assert told(status_file).step == (micro_step + 1) // 2
    found = told(status_file)
    assert found.last is not None
    assert found.samples_per_second == pytest.approx(3 / found.last.total)
    assert found.tokens_per_second == pytest.approx(2 * 16 / found.last.total)


@pytest.mark.parametrize(
    ("inputs", "keywords", "count"),
    [
        ((), {"input_ids": ids(3, 5)}, 15),
        ((ids(3, 5),), {}, 15),
        ((ids(3),), {}, 0),
        ((torch.zeros(3, 5),), {}, 0),
        (("text",), {"input_ids": None}, 0),
        ((), {}, 0),
    ],
    ids=["named", "first", "labels", "features", "no tensor", "nothing"],
)
def test_tokens_are_counted_where_they_are_known(
    status_file: StatusFile, inputs: Any, keywords: Any, count: int
) -> None:
    engine = training(status_file)
    for _ in range(2):
        engine.forward(*inputs, **keywords)
        engine.step()
    found = told(status_file)
    assert found.last is not None
    expected = pytest.approx(2 * count / found.last.total) if count else None
    assert found.tokens_per_second == expected


def linear(step: int, *, num_training_steps: int) -> float:
    return 1.0 - step / num_training_steps


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [
        (SimpleNamespace(total_num_steps=500), 500),  # DeepSpeed's
        (SimpleNamespace(total_steps=400), 400),  # torch's OneCycleLR
        (SimpleNamespace(lr_lambdas=[functools.partial(linear, num_training_steps=300)]), 300),
        (SimpleNamespace(lr_lambdas=[lambda step: 1.0]), None),
        (SimpleNamespace(lr_lambdas=[]), None),
        (None, None),
    ],
    ids=["deepspeed", "torch", "transformers", "endless", "empty", "none"],
)
def test_the_schedule_says_how_many_steps_there_are(
    status_file: StatusFile, schedule: Any, steps: int | None
) -> None:
    engine = training(status_file, schedule)
    for _ in range(2):
        engine.forward()
        engine.step()
    assert told(status_file).steps_total == steps


def test_what_cannot_be_found_out_disturbs_no_step(
    status_file: StatusFile, caplog: pytest.LogCaptureFixture
) -> None:
    engine = training(status_file, SimpleNamespace(total_num_steps="many"))
    for _ in range(4):
        engine.forward()
        assert engine.step() == "stepped None"
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "many" in warning.getMessage()


def test_deepspeeds_monitor_gets_each_step_of_the_optimizer(status_file: StatusFile) -> None:
    engine = training(status_file)
    engine.monitor.enabled = True
    for _ in range(4):
        engine.forward()
        engine.step()
    assert [e[2] for e in engine.monitor.events if e[0] == "memascend/step_seconds"] == [12, 24]


@pytest.mark.parametrize("has_status", [True, False])
def test_forward_passes_and_steps_of_the_optimizer_are_phases(
    status_file: StatusFile, has_status: bool
) -> None:
    attachment = Attachment(status_file if has_status else None)
    engine = Engine(SimpleNamespace(attachment=attachment))
    for _ in range(2):
        engine.forward()
        engine.step()
    with torch.no_grad():
        engine.forward()
    passes = ["forward begins", "forward ends"] * 2
    assert attachment.phases == [*passes, "optimizer begins", "optimizer ends"]


def test_a_step_that_fails_fails_as_it_would(
    status_file: StatusFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Engine) -> None:
        raise ValueError("no step")

    engine = training(status_file)
    engine.forward()
    with pytest.raises(ValueError, match="no step"):
        module.wrap_step(fail)(engine)
    assert told(status_file).last is None


@pytest.mark.parametrize(
    "optimizer",
    [None, object(), SimpleNamespace(attachment=Attachment(None))],
    ids=["inference", "stock", "off"],
)
def test_where_nothing_is_to_be_told_nothing_is_done(optimizer: Any) -> None:
    engine = Engine(optimizer)
    assert engine.forward() == "loss"
    assert engine.step() == "stepped None"


def test_evaluation_is_no_step(status_file: StatusFile) -> None:
    engine = training(status_file)
    with torch.no_grad():
        engine.forward(input_ids=ids(2, 2))
    assert not status_file.place.path.exists()
