"""Master weights in halves: steps, single values, loads and changes give the bits of whole ones."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from memascend.errors import StoreError
from memascend.kernels.adam import AdamCoefficients, update
from memascend.nvme.store import MemoryFaults
from memascend.streaming.optimizer.sub_group import MasterForm
from tests.support.streaming_hosts import memory_store
from tests.support.tiled_training import SIZES, Training, gradients

MOMENTS = ("exp_avg", "exp_avg_sq")
NUMBERS = {
    "factor": 0.5,
    "beta1": 0.9,
    "beta2": 0.99,
    "take1": 0.1,
    "take2": 0.01,
    "root_scale": 3.0,
    "epsilon": 1e-8,
    "step_size": -1e-2,
    "gradient_decay": None,
    "weight_decay": -1e-3,
}
IDLE = {"step_size": -0.0, "weight_decay": None}


def fused(
    changes: dict[str, Any], *, begin: int, factor: float, values: Any, **tensors: Any
) -> None:
    """One step of Adam; the weights may be whole or in halves."""
    moments = {name: values[name] for name in MOMENTS}
    update(coefficients=AdamCoefficients(**NUMBERS | changes), **moments, **tensors)


def training(*, split: bool, state_dtype: torch.dtype = torch.float32, **options: Any) -> Training:
    found = Training(torch.optim.Adam, split=split, state_dtype=state_dtype, **options)
    if not split:
        for name in SIZES:
            weights = found.initial[name].bfloat16().float()
            found.initial[name] = weights
            found.groups.set(name, 0, weights, state=None)
    for name, parameter in found.parameters.items():
        for moment in MOMENTS:
            found.groups.add_state(name, moment, state_dtype, 0.0)
        found.optimizer.state[parameter] = {}
    return found


def steps(*numbers: int) -> Callable[[Training], None]:
    def run(one: Training) -> None:
        for number in numbers:
            one.step(gradients(number, torch.bfloat16), 1.0, partial(fused, {}))

    return run


def idle_step(one: Training) -> None:
    """A step that moves moments alone, so that weights stay ties."""
    one.step(gradients(9, torch.bfloat16), 1.0, partial(fused, IDLE))


def expect_equal(left: Training, right: Training) -> None:
    for name in SIZES:
        assert torch.equal(left.master(name), right.master(name)), name
        assert torch.equal(left.parameter(name), right.parameter(name)), name
        for moment in MOMENTS:
            assert torch.equal(left.master(name, moment), right.master(name, moment)), moment


def both(*actions: Callable[[Training], None], **options: Any) -> list[Training]:
    trained = [training(split=split, **options) for split in (True, False)]
    for one in trained:
        for act in actions:
            act(one)
    return trained


def ties(count: int) -> torch.Tensor:
    """Weights half-way between two bf16 numbers, above an odd one and above an even one."""
    bits = torch.arange(count, dtype=torch.int32) + 0x3F80 << 16 | 0x8000
    return bits.view(torch.float32)


def set_ties(one: Training) -> None:
    one.groups.set("0_3", 11, ties(5000), state=None)


def change_members(one: Training) -> None:
    """Change parameters as a script does outside of a step."""
    one.groups.keep_high("0_3", "4_4")
    for name in ("0_3", "4_4"):
        for member in one.members[name]:
            if member.key is not None:
                value = torch.full((member.numel,), 3.25, dtype=torch.bfloat16)
                one.store.write(key=member.key, source=value).wait()


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "actions",
    [
        [],
        [steps(0)],
        [steps(0, 1, 2)],
        [set_ties, idle_step],
        [set_ties, idle_step, steps(0, 1)],
        [steps(0), set_ties, set_ties, idle_step, idle_step, steps(1)],
    ],
)
def test_steps_on_halves_have_the_bits_of_whole_weights(
    actions: list[Callable[[Training], None]], state_dtype: torch.dtype
) -> None:
    split, whole = both(*actions, state_dtype=state_dtype)
    if not actions:
        assert all(torch.equal(split.master(name), whole.master(name)) for name in SIZES)
    else:
        expect_equal(split, whole)


def test_nothing_is_written_before_the_first_step() -> None:
    split = training(split=True)
    before = split.store.stats()["bytes_written"]
    assert before == pytest.approx(2 * sum(SIZES.values()), rel=0.1), "the members themselves"
    steps(0)(split)
    found = split.store.stats()["bytes_written"] - before
    # Gradients, low halves and members with two bytes each, and two moments.
    assert found == pytest.approx((2 + 2 + 2 + 8) * sum(SIZES.values()), rel=0.1)


def test_a_changed_member_leaves_the_master_weights_as_they_are() -> None:
    split, whole = both(steps(0), set_ties, idle_step)
    before = {name: split.master(name) for name in SIZES}
    change_members(split)
    for name in SIZES:
        assert torch.equal(split.master(name), before[name])
        for moment in MOMENTS:
            assert torch.equal(split.master(name, moment), whole.master(name, moment))
    assert split.parameter("4_4").unique().tolist() == [3.25]
    for one in (split, whole):
        steps(2, 3)(one)
    expect_equal(split, whole)


def test_without_keeping_the_high_halves_a_changed_member_changes_its_master_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    split, whole = both(steps(0))
    monkeypatch.setattr(split.groups, "keep_high", lambda *names: None)
    change_members(split)
    assert not torch.equal(split.master("4_4"), whole.master("4_4"))


def test_a_member_may_change_before_the_first_step() -> None:
    split = training(split=True)
    whole = training(split=False)
    change_members(split)
    change_members(split)
    for one in (split, whole):
        steps(0)(one)
    expect_equal(split, whole)


def test_exact_high_halves_are_given_back_by_the_step_after_the_next() -> None:
    split = training(split=True)
    steps(0)(split)
    change_members(split)
    assert split.store.contains(key="high.4_4")
    steps(1)(split)
    assert split.groups.group("4_4").form is MasterForm.ROUNDED
    steps(2)(split)
    assert not split.store.contains(key="high.4_4")
    split.groups.discard()
    split.gradient_stream.discard()
    assert all(key.startswith("param.") for key in split.store.keys())  # noqa: SIM118


def test_a_second_moment_has_no_flag_for_its_reader_and_is_never_negative() -> None:
    split, whole = both(steps(0), set_ties, idle_step)
    stored = torch.empty(SIZES["0_3"])
    split.store.read(key="state.0_3.exp_avg_sq", target=stored).wait()
    assert (stored < 0).any(), "some weight is a tie, or this test says nothing"
    assert not (split.master("0_3", "exp_avg_sq") < 0).any()
    value = torch.full((100,), -1.0)
    with pytest.raises(ValueError, match="exp_avg_sq of sub-group 0_3 would be -1"):
        split.groups.set("0_3", 5, value, state="exp_avg_sq")
    for one in (split, whole):
        one.groups.set("0_3", 5, torch.full((6000,), 0.25), state="exp_avg_sq")
        one.groups.set("0_3", 6, torch.full((6000,), -0.25), state="exp_avg")
        steps(2)(one)
    expect_equal(split, whole)


def streamed(one: Training, name: str, state: str | None, dtype: torch.dtype) -> torch.Tensor:
    parts = [part.clone() for part in one.groups.stream(name, state)]
    return torch.cat(parts).view(dtype)


def test_what_a_checkpoint_gets_has_the_bytes_of_whole_weights() -> None:
    split, whole = both(steps(0), set_ties, idle_step)
    change_members(split)
    for one in (split, whole):
        one.groups.settle()
    for name in SIZES:
        for state in (None, *MOMENTS):
            parts = [streamed(one, name, state, torch.float32) for one in (split, whole)]
            assert torch.equal(*parts)


@pytest.mark.parametrize("before", [[], [steps(0)], [steps(0), change_members]])
def test_loaded_values_replace_all(
    before: list[Callable[[Training], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    split = training(split=True)
    for act in before:
        act(split)
    _, whole = both(steps(4), set_ties, idle_step)
    split.groups.begin_load()
    with monkeypatch.context() as patch:
        patch.setattr(split.store, "read", pytest.fail)
        for state, name in itertools.product((None, *MOMENTS), SIZES):
            split.load(name, state, whole.master(name, state))
    split.stream.drain()
    for name in SIZES:
        assert torch.equal(split.master(name), whole.master(name))
        assert torch.equal(split.parameter(name), whole.master(name).bfloat16())
    for one in (split, whole):
        steps(6, 7)(one)
    expect_equal(split, whole)


def test_a_damaged_second_moment_is_refused() -> None:
    split = training(split=True)
    steps(0)(split)
    with pytest.raises(ValueError, match="would be -2"):
        split.load("5_9", "exp_avg_sq", torch.tensor([1.0, -2.0, 3.0]))


def test_dropped_states_leave_the_master_weights() -> None:
    split, _ = both(steps(0), set_ties, idle_step)
    before = {name: split.master(name) for name in SIZES}
    split.groups.discard_states()
    assert all(torch.equal(split.master(name), before[name]) for name in SIZES)


def test_an_optimizer_that_steps_by_itself_gets_whole_weights_and_moments_without_flags() -> None:
    split, whole = both(steps(0), set_ties, idle_step)
    for name in SIZES:
        split.groups.make_whole(name)
        split.groups.make_whole(name)
    assert not any(key.startswith(("low.", "high.")) for key in split.store.keys())  # noqa: SIM118
    for one in (split, whole):
        for parameter in one.parameters.values():
            one.optimizer.state[parameter]["step"] = torch.tensor(2.0)
        one.step(gradients(2, torch.bfloat16), 1.0)
        one.step(gradients(3, torch.bfloat16), 1.0)
    expect_equal(split, whole)


def test_a_full_drive_refuses_exact_high_halves_and_nothing_has_changed() -> None:
    faults = MemoryFaults()
    split = training(split=True, store=memory_store(faults))
    steps(0)(split)
    before = split.master("4_4")
    faults.gone = errno.EIO
    with pytest.raises(StoreError):
        split.groups.keep_high("4_4")
    faults.gone = 0
    assert split.groups.group("4_4").form is MasterForm.ROUNDED
    assert torch.equal(split.master("4_4"), before)
    split.groups.keep_high("4_4")
    assert torch.equal(split.master("4_4"), before)


@pytest.mark.parametrize("tile_numel", [4096, 24_576])
def test_tiles_of_any_size_give_the_same_bits(tile_numel: int) -> None:
    split, whole = both(steps(0), set_ties, idle_step, tile_numel=tile_numel)
    expect_equal(split, whole)
