"""The fused step against DeepSpeedCPUAdam's own, bit by bit, and when it is not taken."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("deepspeed")

import deepspeed
from deepspeed.ops.adam import DeepSpeedCPUAdam

from memascend import _core
from memascend.deepspeed.optimizer import fused_adam as module
from memascend.deepspeed.optimizer.beta_powers import BetaPowers, call, recomputes_powers
from memascend.deepspeed.optimizer.fused_adam import FusedAdam, coefficients, fused_adam
from memascend.errors import ConfigError
from memascend.kernels.adam import update
from memascend.streaming.optimizer.tile_memory import TileShape
from tests.support.older_operator import make_older
from tests.support.tiled_training import tile_shape

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ISAS = _core.kernel_isas()
BF16 = torch.bfloat16
MODES = [
    pytest.param(adamw, decay, correction, id=f"{adamw=}-{decay=}-{correction=}")
    for adamw in (True, False)
    for decay in (0.0, 0.1)
    for correction in (True, False)
]
STATES = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}


def shape(gradient: torch.dtype = BF16, parameter: torch.dtype = BF16) -> TileShape:
    return tile_shape(gradient_dtype=gradient, parameter_dtype=parameter)


@pytest.fixture(autouse=True)
def _rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.dist, "get_rank", lambda: 0)


@functools.cache
def operator() -> Any:
    return adam().ds_opt_adam


@functools.cache
def recomputes() -> bool:
    return recomputes_powers(operator())


def adam(**options: Any) -> DeepSpeedCPUAdam:
    return DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(1))], **options)


def random_bits(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """NaN, infinity and denormals among numbers of all sizes."""
    nbytes = numel * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8).view(dtype)


def unaligned(value: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy whose address is no multiple of a vector's."""
    memory = torch.empty(value.numel() + offset, dtype=value.dtype)
    return memory.narrow(0, offset, value.numel()).copy_(value)


def assert_equal(left: torch.Tensor, right: torch.Tensor, *what: object) -> None:
    assert module._are_equal(left, right), what


@pytest.fixture(scope="module")
def tail_width() -> int:
    found = module.find_tail_width(adam(), shape(), recomputes=recomputes())
    assert found is not None, "DeepSpeed's operator on this machine gives other bits"
    return found


class Both:
    """The same values stepped by DeepSpeed's operator and by the fused kernel."""

    NUMBER = 10_000

    def __init__(self, weight: torch.Tensor, group: dict[str, Any], *, adamw: bool) -> None:
        self.group, self.adamw = group, adamw
        numel = weight.numel()
        self.stock = [weight.clone(), torch.zeros(numel), torch.zeros(numel)]
        self.ours = [unaligned(tensor, 1 + index) for index, tensor in enumerate(self.stock)]
        self.powers = BetaPowers.at_start(group["betas"], recomputes=recomputes())
        rates = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
        operator().create_adam(self.NUMBER, *rates, adamw, False)

    def step(
        self, number: int, gradient: torch.Tensor, factor: Any, width: int, **options: Any
    ) -> None:
        wide = gradient.float() if gradient.dtype != torch.float32 else gradient.clone()
        tensors = [self.stock[0], wide.mul_(factor), *self.stock[1:]]
        call(operator(), self.NUMBER, number, self.group, tensors)
        self.powers.advance(number, self.group["betas"])
        output = torch.empty(gradient.numel() + 1, dtype=BF16).narrow(0, 1, gradient.numel())
        update(
            gradient=unaligned(gradient, 3),
            weight=self.ours[0],
            exp_avg=self.ours[1],
            exp_avg_sq=self.ours[2],
            output=output,
            coefficients=coefficients(self.powers, self.group, float(factor), adamw=self.adamw),
            tail_numel=gradient.numel() % width,
            **options,
        )
        for ours, theirs in zip(self.ours, self.stock, strict=True):
            assert_equal(ours, theirs, number, gradient.numel())
        assert_equal(output, self.stock[0].to(BF16), number, gradient.numel())


def group_of(decay: float = 0.1, correction: bool = True, lr: float = 1e-2) -> dict[str, Any]:
    return {
        "lr": lr,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": decay,
        "bias_correction": correction,
    }


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("adamw", "decay", "correction"), MODES)
def test_every_length_steps_as_deepspeeds_operator_does(
    adamw: bool, decay: float, correction: bool, isa: str, tail_width: int
) -> None:
    group = group_of(decay, correction)
    for numel in range(4 * max(tail_width % 64, 16) + 2):
        both = Both(torch.randn(numel), group, adamw=adamw)
        for number in (1, 2, 3):
            gradient = torch.randn(numel).to(DTYPES[(numel + number) % 3])
            both.step(number, gradient, 1.0 if number == 1 else 1 / 3, tail_width, isa=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("adamw", [True, False])
def test_any_bits_step_as_deepspeeds_operator_does(
    adamw: bool, dtype: torch.dtype, isa: str, tail_width: int
) -> None:
    numel = 3 * 32_768 + 77  # several blocks
    both = Both(random_bits(numel, torch.float32, 1), group_of(), adamw=adamw)
    # One after the other, the same again, and after a jump.
    for number in (1, 2, 3, 3, 500, 501):
        gradient = random_bits(numel, dtype, number)
        both.step(number, gradient, 2.0**-number, tail_width, isa=isa, threads=1 + number % 3)


def test_a_tail_is_not_stepped_as_the_rest(tail_width: int) -> None:
    """If this fails, the operator fuses alike everywhere, and the tails above show nothing."""
    if tail_width == 1:
        pytest.skip("this machine's operator fuses alike everywhere")
    both = Both(torch.randn(4096), group_of(), adamw=True)
    both.step(1, torch.randn(4096), 1 / 3, tail_width)
    with pytest.raises(AssertionError):
        both.step(2, torch.randn(4096), 1 / 3, 1 << 62 if tail_width <= 64 else 1)


@pytest.mark.parametrize(
    "factor",
    [
        1 / 3,
        torch.tensor(1 / 3),
        torch.tensor(1 / 3, dtype=torch.float64),
        torch.tensor(0.3).half(),
    ],
)
def test_factors_round_as_torch_multiplies(factor: Any, tail_width: int) -> None:
    both = Both(torch.randn(1000), group_of(), adamw=True)
    both.step(1, torch.randn(1000), factor, tail_width)


# -- running powers ------------------------------------------------------------------------------


def test_powers_follow_betas_that_change(tail_width: int) -> None:
    group = group_of()
    both = Both(torch.randn(100), group, adamw=True)
    for number, betas in enumerate(((0.9, 0.999), (0.8, 0.99), (0.8, 0.99), (0.9, 0.999)), 1):
        group["betas"] = betas
        both.step(number, torch.randn(100), 1.0, tail_width)


@pytest.mark.parametrize("is_older", [False, True])
def test_the_check_notices_the_wrong_rule_of_powers(is_older: bool, tail_width: int) -> None:
    """Whatever the optimizer's own betas are: in few steps those of 0.9 and 0.95 show nothing."""
    optimizer = adam(betas=(0.9, 0.95))
    if is_older:
        make_older(optimizer)
    rule = is_older or recomputes()
    assert module.find_tail_width(optimizer, shape(), recomputes=rule) == tail_width
    assert module.find_tail_width(optimizer, shape(), recomputes=not rule) is None


class Noted:
    """An operator that notes the step and the betas of each call, and steps nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, float, float]] = []

    def adam_update(
        self, _: int, step: int, __: float, beta1: float, beta2: float, *___: Any
    ) -> int:
        self.calls.append((step, beta1, beta2))
        return 0


@pytest.mark.parametrize("is_older", [False, True])
@given(order=st.permutations([number for number in range(3) for _ in range(3)]), data=st.data())
def test_the_operator_is_called_once_for_each_sub_group_whatever_the_order_of_tiles(
    order: list[int], is_older: bool, data: st.DataObject
) -> None:
    """Groups may differ in betas and in counts of steps; every tile has its sub-group's powers."""
    betas = data.draw(
        st.lists(st.sampled_from([(0.9, 0.999), (0.8, 0.99)]), min_size=3, max_size=3)
    )
    counts = data.draw(st.sampled_from([[0, 0, 0], [4, 4, 4], [2, 4, 3]]))
    operator, taken = Noted(), list[tuple[int, BetaPowers]]()
    stand_in: Any = SimpleNamespace(defaults={"betas": betas[0]}, opt_id=7, ds_opt_adam=operator)
    fused = FusedAdam(stand_in, 8, recomputes=is_older)
    fused.why_not = lambda *_: ""  # type: ignore[method-assign]
    fused._apply = (  # type: ignore[method-assign]
        lambda group, number, powers, **_: taken.append((number, powers))
    )
    expected = BetaPowers.at_start(betas[0], recomputes=is_older)
    groups = [group_of() | {"betas": pair} for pair in betas]
    for step in range(1, 13):
        calls = [(group, count + step) for group, count in zip(groups, counts, strict=True)]
        of_stock = list(expected.follow(calls))
        for update_tile in fused.early(calls):
            update_tile()
        assert [powers for _, powers in taken] == of_stock
        assert len(operator.calls) == 3 * (step - 1)
        updates = fused.updates([(g, {"step": number - 1}, STATES) for g, number in calls])
        for number in order:
            update_tile = updates[number]
            assert update_tile is not None
            update_tile(values={})
        assert all(powers == of_stock[number] for number, powers in taken)
        taken.clear()
        assert operator.calls[-3:] == [(number, *group["betas"]) for group, number in calls]


def test_betas_that_change_in_place_behind_a_step_are_those_of_the_next() -> None:
    operator, group = Noted(), group_of() | {"betas": [0.9, 0.999]}
    stand_in: Any = SimpleNamespace(
        defaults={"betas": (0.9, 0.999)}, opt_id=7, ds_opt_adam=operator, adam_w_mode=True
    )
    fused = FusedAdam(stand_in, 8, recomputes=False)
    fused.why_not = lambda *_: ""  # type: ignore[method-assign]
    fused._apply = lambda *_, **__: None  # type: ignore[method-assign]
    (update_tile,) = fused.updates([(group, {"step": 0}, STATES)])
    assert update_tile is not None
    group["betas"][0] = 0.5
    update_tile(values={})
    assert operator.calls == [(1, 0.9, 0.999)]


@pytest.mark.parametrize(
    ("reason", "changed", "options"),
    [
        ("fused is false", {}, {"is_wanted": False}),
        ("no kernel", {"master_dtype": BF16}, {}),
        ("hyperparameters", {}, {}),
        ("hooks", {}, {}),
        ("other bits", {}, {}),
    ],
)
def test_tiles_that_an_older_operator_would_step_itself_are_refused(
    reason: str,
    changed: dict[str, Any],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = make_older(adam())
    if reason == "hyperparameters":
        optimizer.param_groups[0]["lr"] = torch.tensor(1e-3)
    if reason == "hooks":
        optimizer.register_step_pre_hook(lambda *_: None)
    if reason == "other bits":
        monkeypatch.setattr(module, "find_tail_width", lambda *_, **__: None)
    tiles = tile_shape(**changed)
    with pytest.raises(ConfigError, match=rf"{reason}.*0\.19\.0.*{deepspeed.__version__}"):
        fused_adam(optimizer, tiles, largest_numel=tiles.numel + 1, **options)
    fused_adam(optimizer, tiles, largest_numel=tiles.numel, **options)  # one call each, as stock's
    if not recomputes():
        fused_adam(adam(), tiles, largest_numel=tiles.numel + 1, **options)


def test_an_older_operator_is_not_left_to_itself_in_a_later_step() -> None:
    optimizer = make_older(adam())
    fused = fused_adam(optimizer, shape(), largest_numel=shape().numel + 1)
    assert isinstance(fused, FusedAdam)
    assert served(optimizer, fused)
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="hooks"):
        served(optimizer, fused)
    assert fused.is_fused


# -- when it is taken ----------------------------------------------------------------------------


@pytest.fixture
def optimizer() -> DeepSpeedCPUAdam:
    return adam(lr=1e-3, weight_decay=0.1)


def fused_of(optimizer: Any) -> FusedAdam:
    fused = fused_adam(optimizer, shape())
    assert fused.is_fused
    return fused


def served(optimizer: Any, fused: FusedAdam, **values: Any) -> bool:
    group = optimizer.param_groups[0]
    return fused.updates([(group, {"step": 1} | values, STATES)]) != [None]


def test_deepspeeds_cpu_adam_is_fused_and_others_are_not(optimizer: DeepSpeedCPUAdam) -> None:
    assert served(optimizer, fused_of(optimizer))
    params = [torch.nn.Parameter(torch.zeros(1))]

    class Own(DeepSpeedCPUAdam):
        pass

    for other in (torch.optim.Adam(params), torch.optim.AdamW(params, fused=True), Own(params)):
        assert not fused_adam(other, shape()).is_fused


def test_a_learning_rate_of_zero_hides_no_difference(optimizer: DeepSpeedCPUAdam) -> None:
    optimizer.param_groups[0]["lr"] = 0.0  # as at the start of a warm-up
    assert any(group["lr"] > 0 for group in module._groups_to_try(optimizer))


def unlike(optimizer: Any, change: Callable[[list[torch.Tensor]], None]) -> Any:
    """The optimizer with another operator, which changes what the step has made."""
    theirs = optimizer.ds_opt_adam

    def adam_update(*arguments: Any) -> int:
        theirs.adam_update(*arguments)
        change(list(arguments[-4:]))
        return 0

    optimizer.ds_opt_adam = SimpleNamespace(
        create_adam=theirs.create_adam, destroy_adam=theirs.destroy_adam, adam_update=adam_update
    )
    return optimizer


@pytest.mark.parametrize("index", [0, 2, 3])
def test_an_operator_that_differs_in_one_bit_is_left_to_itself(
    optimizer: DeepSpeedCPUAdam, index: int, caplog: pytest.LogCaptureFixture
) -> None:
    def change(tensors: list[torch.Tensor]) -> None:
        tensors[index].view(torch.int32)[-1:] ^= 1

    with caplog.at_level("INFO"):
        assert not fused_adam(unlike(optimizer, change), shape()).is_fused
    assert any("fused" in record.message for record in caplog.records)


def test_the_check_leaves_the_optimizer_as_it_was(optimizer: DeepSpeedCPUAdam) -> None:
    before = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    fused_of(optimizer)
    after = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    assert after == before
    assert not optimizer.state


@pytest.mark.parametrize(
    "changed",
    [{"betas": (1.0, 0.999)}, {"lr": torch.tensor(1e-3)}, {"betas": (0.9, 0.999_999_999_9)}],
)
def test_numbers_that_cannot_be_computed_are_left_to_the_optimizer(
    optimizer: DeepSpeedCPUAdam, changed: dict[str, Any]
) -> None:
    fused = fused_of(optimizer)
    optimizer.param_groups[0].update(changed)
    assert not served(optimizer, fused)
    assert not fused_adam(optimizer, shape()).is_fused


def test_steps_that_somebody_watches_are_left_to_the_optimizer(
    optimizer: DeepSpeedCPUAdam,
) -> None:
    fused = fused_of(optimizer)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    assert served(optimizer, fused)
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    assert not served(optimizer, fused)
    handle.remove()
    assert not served(optimizer, fused)  # its own step has moved powers that are not followed
    fused = fused_of(optimizer)
    optimizer.step = lambda: None
    assert not served(optimizer, fused)


def test_states_of_other_kinds_are_left_to_the_optimizer(optimizer: DeepSpeedCPUAdam) -> None:
    assert not served(optimizer, fused_of(optimizer), step=torch.tensor(1.0))
    group = optimizer.param_groups[0]
    for states in ({}, {"exp_avg": BF16, "exp_avg_sq": BF16}):
        fused = fused_of(optimizer)
        assert fused.updates([(group, {"step": 1}, states)]) == [None]


def test_tiles_that_no_kernel_reads_are_left_to_the_optimizer(optimizer: DeepSpeedCPUAdam) -> None:
    assert not fused_adam(optimizer, shape(gradient=torch.float64)).is_fused
    assert fused_adam(optimizer, shape(parameter=torch.float32)).is_fused


def test_an_optimizer_that_has_stepped_is_left_to_itself(optimizer: DeepSpeedCPUAdam) -> None:
    optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
    optimizer.step()
    assert not fused_adam(optimizer, shape()).is_fused


def test_the_optimizer_may_take_over_after_any_step(optimizer: DeepSpeedCPUAdam) -> None:
    """Its own running powers are where ours are."""
    expected = adam(lr=1e-3, weight_decay=0.1)
    parameters = [opt.param_groups[0]["params"][0] for opt in (optimizer, expected)]
    for parameter in parameters:
        parameter.data = torch.arange(100).float()
    group = optimizer.param_groups[0]
    values: dict[str, Any] = {"step": 0}
    values |= {name: torch.zeros(100) for name in STATES}
    fused = fused_of(optimizer)
    for step in range(1, 40):
        gradient = torch.randn(100, generator=torch.Generator().manual_seed(step))
        parameters[1].grad = gradient
        expected.step()
        if step < 30:
            (update_tile,) = fused.updates([(group, values, STATES)])
            assert update_tile is not None
            weight = parameters[0].data
            update_tile(
                begin=0, gradient=gradient, factor=1.0, weight=weight, values=values, output=None
            )
        else:
            optimizer.state[parameters[0]] = values
            parameters[0].grad = gradient
            optimizer.step()
        assert_equal(parameters[0].data, parameters[1].data, step)
    assert values["step"] == 39
