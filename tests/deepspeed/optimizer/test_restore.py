"""What an optimizer has for a checkpoint, and the order in which it takes one back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from memascend.checkpoint.manifest import SavedPowers
from memascend.checkpoint.source import LoadedTensor
from memascend.config.deepspeed import Aio
from memascend.deepspeed.optimizer import beta_powers
from memascend.deepspeed.optimizer import restore as restoring
from memascend.deepspeed.optimizer.beta_powers import BetaPowers
from memascend.deepspeed.optimizer.restore import replay_beta_powers, restore, stored_tensors
from memascend.deepspeed.optimizer.upstream import Upstream
from memascend.errors import StoreError, TornStepError

FP32 = torch.float32


# -- saving --------------------------------------------------------------------------------------


class Stored:
    """An optimizer of two sub-groups, whose second has no states yet."""

    names, numels = ("0_3", "4_9"), (1000, 3)

    def stored(self, name: str) -> list[tuple[str | None, torch.dtype, Any]]:
        weights = [(None, FP32, partial(iter, f"master.{name}"))]
        moments = ("exp_avg", torch.bfloat16, partial(iter, "moments"))
        return [*weights, moments] if name == "0_3" else weights


def test_every_tensor_has_stocks_file_name_and_its_own_size() -> None:
    found = stored_tensors(Stored(), Stored(), Aio())
    read = [(t.sub_group, t.state, t.file_name, "".join(map(str, t.read()))) for t in found]
    assert read == [
        (0, None, "0_3.tensor.swp", "master.0_3"),
        (0, "exp_avg", "exp_avg-0_3.tensor.swp", "moments"),
        (1, None, "4_9.tensor.swp", "master.4_9"),
    ]
    assert [(t.numel, t.nbytes) for t in found] == [(1000, 4000), (1000, 2000), (3, 12)]


@pytest.mark.parametrize(("aio", "unit"), [(Aio(), 1024), (Aio(intra_op_parallelism=3), 3072)])
def test_files_end_where_stock_reads_whole_units(aio: Aio, unit: int) -> None:
    found = stored_tensors(Stored(), Stored(), aio)
    assert all(t.padded_bytes % unit == 0 for t in found)
    assert all(0 <= t.padded_bytes - t.nbytes < unit for t in found)


# -- loading -------------------------------------------------------------------------------------


class Reader:
    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restoring.dist, "get_rank", lambda: 0)


class Restored:
    """An optimizer, its steps and slots, that notes what it is told. `failing` calls fail."""

    asked_dtype = "fp32"
    momentum_dtype = None
    powers = None

    def __init__(self, **failing: Exception) -> None:
        self.calls: list[str] = []
        self._failing = failing
        self.masters: list[Any] = []
        self.numels = [16] * 4
        self.base = SimpleNamespace(load_state_dict=lambda state: self._note(f"base {state}"))

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call in self._failing:
            raise self._failing[call]

    def wait_writes(self) -> None:
        self._note("wait")

    def begin_load(self) -> None:
        self._note("begin")

    def discard_states(self) -> None:
        self._note("forget")

    @contextmanager
    def masters_in_groups(self) -> Iterator[None]:
        self._note("groups")
        yield
        self._note("no groups")

    def load_tensor(self, tensor: Any) -> None:
        self._note(f"tensor_{tensor.sub_group}")


def load(optimizer: Any, *given: Any) -> None:
    restore(optimizer, optimizer, optimizer, *given)


def tensors(count: int) -> list[LoadedTensor]:
    readers: list[Any] = [Reader() for _ in range(count)]
    return [LoadedTensor(index, None, FP32, reader) for index, reader in enumerate(readers)]


def closed(loaded: list[LoadedTensor]) -> list[Any]:
    readers: list[Any] = [tensor.reader for tensor in loaded]
    return [reader.is_closed for reader in readers]


def test_states_are_forgotten_and_made_anew_before_tensors_come() -> None:
    optimizer, loaded = Restored(), tensors(2)
    load(optimizer, {"a": 1}, loaded)
    base = ["forget", "groups", "base {'a': 1}", "no groups"]
    assert optimizer.calls == ["begin", "wait", *base, "tensor_0", "tensor_1"]
    assert closed(loaded) == [True, True]


def test_weights_alone_leave_the_base_optimizer_as_it_is() -> None:
    optimizer = Restored()
    load(optimizer, {}, tensors(1))
    assert optimizer.calls == ["begin", "wait", "tensor_0"]


def test_a_write_that_failed_before_does_not_matter_and_a_tensor_that_fails_does() -> None:
    optimizer = Restored(wait=StoreError(5, "an old one"), tensor_1=StoreError(5, "a new one"))
    loaded = tensors(3)
    with pytest.raises(StoreError, match="a new one"):
        load(optimizer, {"a": 1}, loaded)
    assert optimizer.calls[-1] == "tensor_1"
    assert closed(loaded) == [True, False, False]  # the others by who opened them


def test_an_optimizer_that_cannot_begin_is_not_touched() -> None:
    optimizer = Restored(begin=TornStepError("half a step"))
    with pytest.raises(TornStepError):
        load(optimizer, {"a": 1}, tensors(1))
    assert optimizer.calls == ["begin"]


# -- what DeepSpeed's Adam knows beside its states -----------------------------------------------


class Adam:
    """Stands for DeepSpeedCPUAdam: notes steps, and that nobody's weights are in them.

    A sub-group has each of the parameters, and betas of its own.
    """

    opt_id = 7

    def __init__(self, steps: list[int | None], betas: list[tuple[float, float]]) -> None:
        self.parameters = [torch.zeros(1) for _ in steps]
        pairs = zip(self.parameters, steps, strict=True)
        self.state = {one: {"step": step} for one, step in pairs if step is not None}
        self.param_groups = [{"betas": pair} for pair in betas]
        self.seen: list[tuple[int, float, float]] = []
        stage3 = SimpleNamespace(
            optimizer=self,
            fp32_partitioned_groups_flat=self.parameters,
            sub_group_to_group_id=range(len(steps)),
        )
        self.upstream = Upstream(stage3)
        self.ds_opt_adam = SimpleNamespace(adam_update=self._update)

    def _update(
        self, opt_id: int, step: int, lr: float, beta1: float, beta2: float, *_: Any
    ) -> None:
        assert (opt_id, lr) == (self.opt_id, 0.0)
        self.seen.append((step, beta1, beta2))


def replayed(
    monkeypatch: pytest.MonkeyPatch,
    optimizer: Adam,
    kind: type,
    saved: SavedPowers | None = None,
) -> list[Any]:
    monkeypatch.setattr(beta_powers, "DeepSpeedCPUAdam", kind)
    noted: list[Any] = []
    follower: Any = SimpleNamespace(advance=lambda step, betas: noted.append((step, *betas)))
    replay_beta_powers(optimizer.upstream, follower, saved)
    assert noted == optimizer.seen
    return optimizer.seen


def test_steps_are_replayed_twice_for_each_run_of_sub_groups_with_the_same_betas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = (0.9, 0.999), (0.8, 0.99)
    optimizer = Adam([3] * 5 + [None], [one, one, one, other, one, one])
    expected = [(step, *betas) for step in (1, 2, 3) for betas in (one, one, other, one)]
    assert replayed(monkeypatch, optimizer, Adam) == expected
    assert replayed(monkeypatch, Adam([2], [one]), Adam) == [(1, *one), (2, *one)]


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_replay_ends_with_the_powers_of_a_run_that_was_not_interrupted(
    monkeypatch: pytest.MonkeyPatch, count: int, recomputes: bool
) -> None:
    for last in (3, 12):
        for betas in ([(0.9, 0.999)] * count, [(0.9, 0.999), *[(0.9, 0.95)] * (count - 1)]):
            whole = BetaPowers.at_start((0.9, 0.999), recomputes=recomputes)
            loaded = replace(whole)
            for step in range(1, last + 1):
                for pair in betas:
                    whole.advance(step, pair)
            for step, *pair in replayed(monkeypatch, Adam([last] * count, betas), Adam):
                loaded.advance(step, (pair[0], pair[1]))
            assert loaded == whole


#: Betas of each step: changed once, changed at every step, and taken back.
CHANGES: dict[str, Callable[[int], tuple[float, float]]] = {
    "once": lambda step: (0.9, 0.999) if step < 8 else (0.85, 0.99),
    "always": lambda step: (0.8 + step / 100, 0.99),
    "back": lambda step: (0.8, 0.99) if step == 5 else (0.9, 0.999),
    "never": lambda step: (0.9, 0.95),
}


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_powers_of_betas_that_changed_are_those_of_a_run_that_was_not_interrupted(
    monkeypatch: pytest.MonkeyPatch, change: str, count: int, recomputes: bool
) -> None:
    """The loaded optimizer's group has the betas of the next step, as a scheduler sets them."""
    for last in (1, 5, 6, 12):
        whole = BetaPowers.at_start((0.9, 0.95), recomputes=recomputes)
        loaded = replace(whole)
        for step in range(1, last + 1):
            for _ in range(count):
                whole.advance(step, CHANGES[change](step))
        saved = SavedPowers(
            beta1=whole.beta1, beta2=whole.beta2, since=whole.since, step=whole.step
        )
        # A loaded optimizer may have made steps; the last one may precede the first replayed call.
        for before in (0, last - 1, last, last + 1):
            loaded.advance(before, (whole.beta1, whole.beta2))
            adam = Adam([last] * count, [CHANGES[change](last + 1)] * count)
            for step, *pair in replayed(monkeypatch, adam, Adam, saved):
                loaded.advance(step, (pair[0], pair[1]))
            assert (loaded.power1, loaded.power2) == (whole.power1, whole.power2)
            assert loaded.step == whole.step


def test_powers_of_another_step_are_not_those_of_the_optimizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved = SavedPowers(beta1=0.5, beta2=0.5, since=2, step=9)
    betas = (0.9, 0.999)
    assert replayed(monkeypatch, Adam([2], [betas]), Adam, saved) == [(1, *betas), (2, *betas)]


@pytest.mark.parametrize("steps", [[3, 4], [None], [0]])
def test_without_one_count_of_steps_nothing_is_replayed(
    monkeypatch: pytest.MonkeyPatch, steps: list[int | None]
) -> None:
    assert replayed(monkeypatch, Adam(steps, [(0.9, 0.999)] * 2), Adam) == []


def test_another_optimizer_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    derived = type("Derived", (Adam,), {})
    assert replayed(monkeypatch, derived([2], [(0.9, 0.999)]), Adam) == []
