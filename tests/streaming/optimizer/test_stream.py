"""The tiled walk against the same optimizer on whole tensors, bit by bit."""

from __future__ import annotations

import errno
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memascend.errors import StoreError, TornStepError
from memascend.nvme.store import MemoryFaults, TensorStore
from tests.support.nvme_memory import BOUNCE_BYTES, PageMemory
from tests.support.streaming_fakes import LateDevice
from tests.support.streaming_hosts import memory_store
from tests.support.tiled_training import SIZES, Training, gradients

FACTORS = (1.0, 0.25, 1 / 3)
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    "Adadelta": lambda params: torch.optim.Adadelta(params, lr=1e-2),
    "Adamax": lambda params: torch.optim.Adamax(params, lr=1e-2),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=1e-2),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-2, momentum=0.9, centered=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, dampening=0.5),
}


@pytest.fixture(autouse=True)
def _one_thread():
    """torch splits a tensor over threads by its size, and ends of the parts take other code."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


def whole_tensors(training: Training, make: Any, dtype: torch.dtype) -> torch.optim.Optimizer:
    params = [torch.nn.Parameter(weights.clone()) for weights in training.initial.values()]
    optimizer = make(params)
    for step, factor in enumerate(FACTORS):
        values = gradients(step, dtype).values()
        for param, gradient in zip(params, values, strict=True):
            param.grad = gradient.float().mul_(factor)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", list(MAKERS))
def test_an_elementwise_optimizer_gives_the_bits_of_whole_tensors(
    kind: str, dtype: torch.dtype
) -> None:
    training = Training(MAKERS[kind], gradient_dtype=dtype)
    for step, factor in enumerate(FACTORS):
        training.step(gradients(step, dtype), factor)
    expected = whole_tensors(training, MAKERS[kind], dtype)
    for (name, numel), param in zip(SIZES.items(), expected.param_groups[0]["params"], strict=True):
        assert torch.equal(training.master(name), param.data)
        assert torch.equal(training.parameter(name), param.data.bfloat16())
        for state, value in expected.state[param].items():
            ours = training.optimizer.state[training.parameters[name]][state]
            if value.shape == (numel,):
                assert torch.equal(training.master(name, state), value), state
                assert ours.numel() == 0
            else:
                assert ours == value, state
        assert training.parameters[name].numel() == 0
        assert training.parameters[name].grad is None


@pytest.mark.parametrize(("tile_numel", "tile_count"), [(24_576, 1), (4096, 1), (8192, 2)])
def test_size_and_number_of_tiles_do_not_show(tile_numel: int, tile_count: int) -> None:
    make = MAKERS["AdamW"]
    training = Training(make, tile_numel=tile_numel, tile_count=tile_count)
    for step, factor in enumerate(FACTORS):
        training.step(gradients(step, torch.bfloat16), factor)
    expected = whole_tensors(training, make, torch.bfloat16)
    for name, param in zip(SIZES, expected.param_groups[0]["params"], strict=True):
        assert torch.equal(training.master(name), param.data)


@pytest.mark.parametrize("make_device", [lambda: None, LateDevice])
@pytest.mark.parametrize("tile_count", [1, 3])
def test_members_take_loaded_weights_as_these_pass_by(
    tile_count: int, make_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(MAKERS["Adam"], device=make_device(), tile_count=tile_count)
    with monkeypatch.context() as patch:
        patch.setattr(training.store, "read", pytest.fail)
        for name, weights in training.initial.items():
            training.load(name, None, -weights)
        training.stream.drain()
    for name, weights in training.initial.items():
        assert torch.equal(training.master(name), -weights)
        assert torch.equal(training.parameter(name), -weights.bfloat16())


def test_slots_that_wait_for_members_get_the_values_that_are_stored() -> None:
    training, waiting = Training(MAKERS["Adam"]), dict[str, torch.Tensor]()
    for member in itertools.chain(*training.members.values()):
        if member.key is not None:
            waiting[member.key] = torch.zeros(member.numel, dtype=member.dtype)
            training.stream._hand_over.offer(member.key, waiting[member.key])
    training.step(gradients(0, torch.bfloat16), 1.0)
    for key, slot in waiting.items():
        assert training.stream._hand_over.take(key, slot.numel()) == 0
        stored = torch.empty_like(slot)
        training.store.read(key=key, target=stored).wait()
        assert torch.equal(slot, stored), key


def test_an_error_of_the_drive_is_raised_and_nothing_hangs() -> None:
    store = TensorStore(
        volumes=["(memory)"],
        bounce=PageMemory(BOUNCE_BYTES).tensor,
        engine="memory",
        faults=MemoryFaults(seed=1, eio=0.002),
        eio_retries=0,
    )

    def train() -> None:
        training = Training(MAKERS["Adam"], store=store)
        for step in range(50):
            training.step(gradients(step, torch.bfloat16), 1.0)

    with pytest.raises(StoreError):
        train()


# -- a fused update --------------------------------------------------------------------------------


class Halving:
    """Takes half of the gradient from the weight, and counts; torch's SGD would do the same."""

    def __init__(self) -> None:
        self.given: list[tuple[torch.dtype, float]] = []

    def __call__(
        self,
        *,
        gradient: torch.Tensor,
        factor: float,
        weight: torch.Tensor,
        values: Any,
        scales: None,
        output: torch.Tensor | None,
        begin: int,
    ) -> None:
        self.given.append((gradient.dtype, factor))
        values["step"] += 1
        weight.add_(gradient.float() * factor, alpha=-0.5)
        values["exp_avg"].add_(weight)
        assert output is not None
        output.copy_(weight)


def halving_training(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Training:
    training = Training(torch.optim.AdamW, gradient_dtype=dtype, **options)
    for name, parameter in training.parameters.items():
        training.groups.add_state(name, "exp_avg", torch.float32, 0.0)
        training.optimizer.state[parameter] = {"step": 0, "exp_avg": torch.empty(0)}
    return training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_fused_update_gets_gradients_as_stored_and_gives_the_members_their_dtype(
    dtype: torch.dtype,
) -> None:
    training, fused = halving_training(dtype), Halving()
    expected = {name: value.clone() for name, value in training.initial.items()}
    moments = {name: torch.zeros(numel) for name, numel in SIZES.items()}
    for step, factor in enumerate(FACTORS):
        values = gradients(step, dtype)
        training.step(values, factor, fused)
        for name, value in values.items():
            expected[name].add_(value.float() * factor, alpha=-0.5)
            moments[name] += expected[name]
    for name in SIZES:
        parameter = training.parameters[name]
        assert torch.equal(training.master(name), expected[name])
        assert torch.equal(training.master(name, "exp_avg"), moments[name])
        assert torch.equal(training.parameter(name), expected[name].bfloat16())
        assert training.optimizer.state[parameter]["step"] == len(FACTORS)  # not of tiles
        assert training.optimizer.state[parameter]["exp_avg"].numel() == 0
        assert parameter.numel() == 0
    assert {given for given, _ in fused.given} == {dtype}
    assert {factor for _, factor in fused.given} == set(FACTORS)


def test_a_fused_update_gets_products_where_earlier_factors_are_due() -> None:
    """Without a new gradient it is the old one, times what finished steps multiplied it by."""
    training, fused = halving_training(), Halving()
    values = gradients(0, torch.bfloat16)
    training.step(values, 0.25, fused)
    fused.given.clear()
    training.step({}, 0.5, fused)
    assert set(fused.given) == {(torch.float32, 1.0)}
    for name, value in values.items():
        wide = value.float()
        expected = training.initial[name] - 0.5 * (wide * 0.25) - 0.5 * (wide * 0.25 * 0.5)
        assert torch.equal(training.master(name), expected)


def test_a_fused_update_reads_zeros_where_no_gradient_came() -> None:
    training, fused = halving_training(), Halving()
    part = torch.ones(5000).bfloat16()
    training.gradient_stream.put("0_3", 4000, part)
    training.step({}, 1.0, fused)
    expected = training.initial["0_3"].clone()
    expected[4000:9000] -= 0.5
    assert torch.equal(training.master("0_3"), expected)
    assert torch.equal(training.master("4_4"), training.initial["4_4"])


@pytest.mark.parametrize(
    ("factor", "given"),
    [
        (torch.tensor(0.5), (torch.bfloat16, 0.5)),
        (torch.tensor(1 / 3, dtype=torch.float64), (torch.bfloat16, 1 / 3)),
        (torch.tensor([0.5]), (torch.float32, 1.0)),  # may promote: torch multiplies
    ],
)
def test_a_fused_update_multiplies_by_numbers_alone(
    factor: torch.Tensor, given: tuple[torch.dtype, float]
) -> None:
    training, fused = halving_training(), Halving()
    training.step(gradients(0, torch.bfloat16), factor, fused)
    assert set(fused.given) == {given}


def test_states_are_made_by_the_optimizer_before_a_fused_update_is_taken() -> None:
    training, fused = Training(torch.optim.AdamW), Halving()
    training.step(gradients(0, torch.bfloat16), 1.0, fused)
    assert not fused.given
    assert list(training.groups.group("0_3").states) == ["exp_avg", "exp_avg_sq"]


# -- parameters on a device whose copies happen late -----------------------------------------------


@pytest.mark.parametrize("tile_count", [1, 2, 3])
@pytest.mark.parametrize("is_fused", [False, True])
def test_the_walk_goes_on_while_a_device_takes_its_weights(is_fused: bool, tile_count: int) -> None:
    device, fused = LateDevice(), Halving() if is_fused else None
    options: dict[str, Any] = {"device": device, "tile_count": tile_count}
    training = halving_training(**options) if fused else Training(torch.optim.AdamW, **options)
    pending: list[int] = []

    def update(*arguments: Any, **keywords: Any) -> None:
        pending.append(device._issued - device._done)
        original(*arguments, **keywords)

    owner, name = (Halving, "__call__") if is_fused else (training.optimizer, "step")
    original = getattr(owner, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, update)
        patch.setattr(training.stream, "drain", lambda: None)  # other streams read without it
        training.step(gradients(0, torch.bfloat16), 1.0, fused)
    assert device._issued == device._done > 0
    for name in SIZES:
        assert torch.equal(training.parameter(name), training.master(name).bfloat16())
    assert (max(pending) > 0) == (tile_count > 1)


# -- half a step -----------------------------------------------------------------------------------


class Interrupted(Exception):
    """Ctrl-C, a device's error, a failed read: whatever comes in the middle."""


def torn(after: int) -> tuple[Training, dict[str, torch.Tensor]]:
    """A training whose second step ends after so many tiles were updated."""
    training = Training(torch.optim.AdamW)
    gradients = {name: torch.randn(numel).bfloat16() for name, numel in SIZES.items()}
    training.step(gradients, 1.0)
    calls = itertools.count()
    step = training.optimizer.step

    def interrupted() -> None:
        if next(calls) == after:
            raise Interrupted
        step()

    training.optimizer.step = interrupted  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        training.step(gradients, 1.0)
    training.optimizer.step = step  # type: ignore[method-assign]
    return training, gradients


@pytest.mark.parametrize("after", [0, 1, 3])
def test_half_a_step_is_never_taken_for_a_whole_one(after: int) -> None:
    """Stepped again, what was updated already would be updated twice."""
    training, gradients = torn(after)
    for parameter in training.parameters.values():
        assert parameter.numel() == 0  # nothing points into a tile that others use now
        assert parameter.grad is None
    with pytest.raises(TornStepError, match="load a checkpoint"):
        training.step(gradients, 1.0)
    with pytest.raises(TornStepError):
        training.current.check()
    for name, numel in SIZES.items():
        training.load(name, None, torch.zeros(numel))
        training.stream.drain()
        assert torch.equal(training.master(name), torch.zeros(numel))
    with pytest.raises(TornStepError):
        training.step(gradients, 1.0)
    training.current.mend()
    training.step(gradients, 1.0)


def test_after_a_drive_failed_in_a_step_a_load_is_enough() -> None:
    """Keys whose writes failed are readable again, though they are loaded in parts."""
    faults = MemoryFaults()
    training = Training(torch.optim.AdamW, store=memory_store(faults))
    values = gradients(0, torch.bfloat16)
    training.step(values, 1.0)
    step = training.optimizer.step

    def failing() -> None:
        step()
        faults.gone = errno.EROFS

    training.optimizer.step = failing  # type: ignore[method-assign]
    with pytest.raises(StoreError):
        training.step(values, 1.0)
    training.optimizer.step = step  # type: ignore[method-assign]
    faults.gone = 0
    training.groups.discard_states()
    for name, numel in SIZES.items():
        for state in (None, "exp_avg", "exp_avg_sq"):
            training.load(name, state, torch.zeros(numel))
            training.optimizer.state[training.parameters[name]]["step"] = torch.tensor(1.0)
        training.stream.drain()
        assert torch.equal(training.master(name), torch.zeros(numel))
        assert torch.equal(training.parameter(name), torch.zeros(numel).bfloat16())
    training.current.mend()
    training.step(values, 1.0)


def test_an_error_before_the_first_update_leaves_the_step_to_be_repeated() -> None:
    training = Training(torch.optim.AdamW)
    expected = Training(torch.optim.AdamW)
    gradients = {name: torch.randn(numel).bfloat16() for name, numel in SIZES.items()}
    load = training.gradient_stream.convert

    def failing(*_: object) -> None:
        raise Interrupted

    training.gradient_stream.convert = failing  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        training.step(gradients, 1.0)
    training.gradient_stream.convert = load  # type: ignore[method-assign]
    training.step(gradients, 1.0)
    expected.step(gradients, 1.0)
    for name in SIZES:
        assert torch.equal(training.master(name), expected.master(name))


def test_no_tensor_of_the_step_was_not_planned() -> None:
    """Every optimizer that makes its own states finds room in the tiles as they were made."""
    make = functools.partial(torch.optim.RMSprop, momentum=0.9, centered=True)
    training = Training(make, state_count=3)
    before = dict(training.memory.nbytes)
    gradients = {name: torch.randn(numel).bfloat16() for name, numel in SIZES.items()}
    training.step(gradients, 1.0)
    assert dict(training.memory.nbytes) == before
