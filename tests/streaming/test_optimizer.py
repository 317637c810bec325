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
from memascend.streaming.gradients import GradientSpool
from memascend.streaming.optimizer import OptimizerStream
from memascend.streaming.sub_groups import Member, StepIntegrity, SubGroups
from memascend.streaming.tiles import Tiles, TileShape
from tests.support.nvme_memory import BOUNCE_BYTES, PageMemory
from tests.support.streaming_hosts import HostTensors, memory_store, staging_slots

SIZES = {"0_3": 20_011, "4_4": 8192, "5_9": 3}
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


class Training:
    """Sub-groups in a stream, with members on the drive and in memory, and one optimizer."""

    def __init__(
        self,
        make: Callable[[Any], torch.optim.Optimizer],
        *,
        store: TensorStore | None = None,
        tile_numel: int = 4096,
        tile_count: int = 3,
        gradient_dtype: torch.dtype = torch.bfloat16,
        state_count: int = 2,
    ) -> None:
        self.store = store or memory_store()
        self.slots = staging_slots(self.store)
        self.spool = GradientSpool(store=self.store, slots=self.slots)
        self.memory = HostTensors()
        shape = TileShape(
            numel=tile_numel,
            count=tile_count,
            state_count=state_count,
            master_dtype=torch.float32,
            gradient_dtype=gradient_dtype,
            parameter_dtype=torch.bfloat16,
        )
        tiles = Tiles(store=self.store, memory=self.memory, shape=shape)
        self.tiles = tiles
        self.groups = SubGroups(
            store=self.store, slots=self.slots, tiles=tiles, integrity=StepIntegrity()
        )
        self.stream = OptimizerStream(groups=self.groups, tiles=tiles, spool=self.spool)
        self.initial = {
            name: torch.randn(numel, generator=torch.Generator().manual_seed(numel))
            for name, numel in SIZES.items()
        }
        self.members = {}
        for name, numel in SIZES.items():
            weights = self.initial[name]
            self.groups.create(name, numel, [Member(0, numel, weights.dtype, tensor=weights)])
            self.members[name] = self._members(name, numel)
        self.parameters = {name: torch.nn.Parameter(torch.empty(0)) for name in SIZES}
        self.optimizer = make(list(self.parameters.values()))
        (self.group,) = self.optimizer.param_groups
        self.group["params"] = []

    def _members(self, name: str, numel: int) -> list[Member]:
        """Odd thirds: two on the drive, the last in memory."""
        cuts = [0, numel // 3, numel // 3 * 2, numel]
        members = []
        for index, (begin, end) in enumerate(itertools.pairwise(cuts)):
            count = end - begin
            if index < 2 and count:
                key = f"param.{name}.{index}"
                self.store.reserve(key=key, nbytes=count * 2)
                members.append(Member(begin, count, torch.bfloat16, key=key))
            elif count:
                tensor = torch.empty(count, dtype=torch.bfloat16)
                members.append(Member(begin, count, torch.bfloat16, tensor=tensor))
        return members

    def step(self, gradients: dict[str, torch.Tensor], factor: float) -> None:
        for name, gradient in gradients.items():
            self.spool.put(name, 0, gradient)
        self.stream.begin(list(SIZES))
        for name in SIZES:
            parameter = self.parameters[name]

            def update(parameter: torch.Tensor = parameter) -> None:
                self.group["params"] = [parameter]
                self.optimizer.step()
                self.group["params"] = []

            self.stream.step(
                name,
                parameter=parameter,
                states=self.optimizer.state,
                update=update,
                factor=factor,
                members=self.members[name],
            )
        self.stream.drain()

    def master(self, name: str, state: str | None = None) -> torch.Tensor:
        value = torch.empty(SIZES[name])
        self.groups.get(name, 0, value, state=state)
        return value

    def parameter(self, name: str) -> torch.Tensor:
        parts = []
        for member in self.members[name]:
            part = member.tensor
            if member.key is not None:
                part = torch.empty(member.numel, dtype=member.dtype)
                self.store.read(key=member.key, target=part).wait()
            assert part is not None
            parts.append(part)
        return torch.cat(parts)


def gradients(step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(n, generator=generator).to(dtype) for name, n in SIZES.items()}


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


def test_the_memory_of_the_tiles_is_what_they_say() -> None:
    training = Training(MAKERS["Adam"])
    assert sum(training.memory.nbytes.values()) == training.tiles.nbytes
    training.step(gradients(0, torch.bfloat16), 1.0)
    assert sum(training.memory.nbytes.values()) == training.tiles.nbytes


def test_states_that_begin_as_one_value_are_not_written_before_they_change() -> None:
    training = Training(MAKERS["Adam"])
    for name in SIZES:
        training.groups.add_state(name, "exp_avg", torch.float32, 0.0)
        training.groups.add_state(name, "exp_avg_sq", torch.float32, 0.5)
        training.optimizer.state[training.parameters[name]] = {"step": torch.tensor(0.0)}
    assert training.master("0_3", "exp_avg_sq").unique().tolist() == [0.5]
    training.step(gradients(0, torch.bfloat16), 1.0)
    decayed = gradients(0, torch.bfloat16)["4_4"].float() + 0.1 * training.initial["4_4"]
    expected = 0.5 * 0.999 + 0.001 * decayed.square()
    assert torch.allclose(training.master("4_4", "exp_avg_sq"), expected)


def test_single_values_are_read_and_replaced() -> None:
    training = Training(MAKERS["Adam"])
    training.groups.add_state("0_3", "exp_avg", torch.float32, 2.0)
    value = torch.full((5000,), 7.0)
    training.groups.set("0_3", 3000, value, state="exp_avg")
    training.groups.set("0_3", 11, value, state=None)
    expected = torch.full((SIZES["0_3"],), 2.0)
    expected[3000:8000] = 7.0
    assert torch.equal(training.master("0_3", "exp_avg"), expected)
    expected = training.initial["0_3"].clone()
    expected[11:5011] = 7.0
    assert torch.equal(training.master("0_3"), expected)


def test_members_take_the_values_of_changed_master_weights() -> None:
    training = Training(MAKERS["Adam"])
    training.groups.set("0_3", 0, torch.arange(SIZES["0_3"]).float(), state=None)
    training.stream.refresh("0_3", training.members["0_3"])
    training.stream.drain()
    assert torch.equal(training.parameter("0_3"), torch.arange(SIZES["0_3"]).float().bfloat16())


def test_an_error_of_the_drive_is_raised_and_nothing_hangs() -> None:
    store = TensorStore(
        volumes=["(memory)"],
        bounce=PageMemory(BOUNCE_BYTES),
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


def test_discarding_gives_the_space_back() -> None:
    training = Training(MAKERS["Adam"])
    training.step(gradients(0, torch.bfloat16), 1.0)
    training.groups.discard()
    training.spool.discard()
    assert all(key.startswith("param.") for key in training.store.keys())  # noqa: SIM118


def test_after_a_drive_failed_discarding_is_no_second_error() -> None:
    faults = MemoryFaults()
    training = Training(torch.optim.AdamW, store=memory_store(faults))
    training.step(gradients(0, torch.bfloat16), 1.0)
    tile = training.tiles.take("0_3", 0, SIZES["0_3"])
    faults.gone = errno.EROFS
    training.tiles.write(tile, "master.0_3", tile.master)
    training.tiles.retire(tile)
    training.groups.discard()
    assert all(key.startswith(("param.", "grad")) for key in training.store.keys())  # noqa: SIM118


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
        training.groups.settle()
    for name, numel in SIZES.items():
        training.groups.load(name, state=None, dtype=torch.float32, source=lambda _, to: to.zero_())
        training.stream.refresh(name, training.members[name])
        assert torch.equal(training.master(name), torch.zeros(numel))
    with pytest.raises(TornStepError):
        training.step(gradients, 1.0)
    training.groups.integrity.mend()
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
    training.groups.forget_states()
    for name, numel in SIZES.items():
        for state in (None, "exp_avg", "exp_avg_sq"):
            training.groups.load(
                name, state=state, dtype=torch.float32, source=lambda _, to: to.zero_()
            )
            training.optimizer.state[training.parameters[name]]["step"] = torch.tensor(1.0)
        training.stream.refresh(name, training.members[name])
        training.stream.drain()
        assert torch.equal(training.master(name), torch.zeros(numel))
        assert torch.equal(training.parameter(name), torch.zeros(numel).bfloat16())
    training.groups.integrity.mend()
    training.step(values, 1.0)


def test_an_error_before_the_first_update_leaves_the_step_to_be_repeated() -> None:
    training = Training(torch.optim.AdamW)
    expected = Training(torch.optim.AdamW)
    gradients = {name: torch.randn(numel).bfloat16() for name, numel in SIZES.items()}
    load = training.spool.load

    def failing(*_: object) -> None:
        raise Interrupted

    training.spool.load = failing  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        training.step(gradients, 1.0)
    training.spool.load = load  # type: ignore[method-assign]
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
