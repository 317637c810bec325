"""Around the engine's forward pass: hooks where a training's section is on, else nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("deepspeed")
import torch
from deepspeed.runtime.engine import EngineTimers
from deepspeed.utils.timer import SynchronizedWallClockTimer

from memascend.deepspeed.activations import forward as module
from memascend.deepspeed.attach import attachment as attaching
from memascend.errors import TornStepError
from tests.support.activation_streams import activation_stream

pytestmark = pytest.mark.deepspeed


class Attachment:
    """What the wrapper asks of one."""

    def __init__(self, *, enabled: bool) -> None:
        section = SimpleNamespace(enabled=enabled, min_bytes=1024)
        config = SimpleNamespace(activations=section, micro_batches=None)
        self.runtime = SimpleNamespace(config=config, activations=activation_stream())
        self.status = self.slices = None
        self.failures: Any = None

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()


def ours(attachment: Attachment, **more: Any) -> Any:
    """Our optimizer, as the wrapper uses it."""
    return SimpleNamespace(attachment=attachment, check_values=lambda: None, **more)


class Engine:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.module = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        self.module.register_buffer("mask", torch.ones(64, 64))
        self.seen: list[object] = []
        self.engine_timers = EngineTimers(enable_micro_timers=True, enable_global_timers=True)
        self.timers = SynchronizedWallClockTimer()

    def forward(self, hidden: torch.Tensor, *, scale: float) -> torch.Tensor:
        self.seen.append(module.current.get())
        return self.module(hidden * self.module.mask).sum() * scale


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attaching, "Attachment", Attachment)


def run(engine: Engine) -> torch.Tensor:
    hidden = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    loss: torch.Tensor = module.wrap_forward(Engine.forward)(
        engine, hidden.requires_grad_(), scale=2.0
    )
    return loss


@pytest.mark.parametrize(
    "optimizer",
    [None, object(), ours(Attachment(enabled=False))],
    ids=["inference", "stock", "off"],
)
def test_where_it_is_not_on_nothing_is_done(optimizer: Any) -> None:
    engine = Engine(optimizer)
    run(engine).backward()
    assert engine.seen == [None]


def test_an_optimizer_that_deepspeed_does_not_tell_is_told_before_the_pass() -> None:
    engine = Engine(ours(Attachment(enabled=False)))
    engine.optimizer.clear_backward_seen_flag = lambda: engine.seen.append("begun")
    run(engine)
    assert engine.seen == ["begun", None]


@pytest.mark.parametrize(
    ("trains", "has_gradient", "expected"),
    [(True, True, True), (True, False, True), (False, True, True), (False, False, False)],
)
def test_an_evaluation_is_told_from_a_pass_of_a_step(
    trains: bool, has_gradient: bool, expected: bool
) -> None:
    begun: list[dict[str, bool]] = []
    attachment = Attachment(enabled=False)
    attachment.failures = SimpleNamespace(
        begin_pass=lambda **keywords: begun.append(keywords), end_pass=lambda **_: None
    )
    passes = SimpleNamespace(passes=SimpleNamespace(was_left=lambda: True))
    engine = Engine(ours(attachment, passes=passes))
    engine.module.train(trains)
    with torch.set_grad_enabled(has_gradient):
        run(engine)
    assert begun == [{"trains": expected, "was_left": True}]


def test_timers_that_a_failed_pass_left_running_can_be_started_again() -> None:
    engine = Engine(ours(Attachment(enabled=False)))
    *stopped, running = engine.engine_timers.active_timers()
    for name in (*stopped, running):
        engine.timers(name).start()
    for name in stopped:
        engine.timers(name).stop()
    run(engine)
    for name in (*stopped, running):
        assert len(engine.timers(name).event_timers) == 1
        engine.timers(name).start()


def test_no_pass_begins_with_values_of_two_steps() -> None:
    engine = Engine(ours(Attachment(enabled=False)))

    def refuse() -> None:
        raise TornStepError("torn")

    engine.optimizer.check_values = refuse
    with pytest.raises(TornStepError):
        run(engine)
    assert engine.seen == []


def test_without_gradients_nothing_is_done() -> None:
    attachment = Attachment(enabled=True)
    engine = Engine(ours(attachment))
    with torch.no_grad():
        run(engine)
    assert engine.seen == [None]
    assert attachment.runtime.activations.traffic.count == 0


def test_what_forward_saves_goes_and_comes_back() -> None:
    attachment = Attachment(enabled=True)
    engine = Engine(ours(attachment))
    stock = Engine(None)
    stock.module.load_state_dict(engine.module.state_dict())
    loss = run(engine)
    assert engine.seen[0] is not None
    assert module.current.get() is None
    # Each layer's input, and the first one's factor; neither weights nor the buffer.
    assert attachment.runtime.activations.traffic.count == 4
    loss.backward()
    run(stock).backward()
    for found, expected in zip(engine.module.parameters(), stock.module.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)
    assert attachment.runtime.activations.count == 0


def test_an_error_ends_the_hooks() -> None:
    engine = Engine(ours(Attachment(enabled=True)))
    with pytest.raises(TypeError, match="unsupported operand"):
        module.wrap_forward(Engine.forward)(engine, torch.zeros(64, 64), scale=None)
    assert module.current.get() is None


def test_where_hooks_cannot_be_set_nothing_stays_behind() -> None:
    engine = Engine(ours(Attachment(enabled=True)))
    refused = torch.autograd.graph.disable_saved_tensors_hooks("not here")
    with refused, pytest.raises(RuntimeError, match="not here"):
        run(engine)
    assert module.current.get() is None


def test_parameters_and_buffers_are_the_models() -> None:
    engine = Engine(None)
    is_of_model = module.ModelTensors(engine.module)
    weight, mask = engine.module[0].weight, engine.module.mask
    assert is_of_model(weight)
    assert is_of_model(mask)
    assert is_of_model(mask[3:])
    gathered = torch.zeros(3)
    gathered.ds_id = 3  # type: ignore[attr-defined]
    assert is_of_model(gathered)
    assert not is_of_model(torch.zeros(3))
