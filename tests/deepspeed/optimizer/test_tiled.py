"""A ZeRO-3 optimizer's steps in tiles: upstream's hooks over sub-groups that are never whole."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

from memascend.checkpoint.source import LoadedTensor
from memascend.deepspeed.optimizer import tiled
from memascend.deepspeed.optimizer.restore import replay_beta_powers
from memascend.deepspeed.optimizer.swapper import StreamedSwapper
from memascend.errors import GradientGoneError, StoreError, StoreFullError, TornStepError
from memascend.runtime import Runtime
from memascend.streaming.optimizer.step import StepPhase
from tests.support.tiled_optimizer import BF16, FLAT, NAMES, Tiled, stock_unused
from tests.support.tiled_training import SIZES, gradients

FP32 = torch.float32


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """torch splits a tensor over threads by its size, and ends of the parts take other code."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.fixture
def optimizer() -> Tiled:
    return Tiled(adamw)


def fused_and_own(make: Any) -> list[Tiled]:
    """Two of the same, of which the first steps in one pass and the second by itself."""
    return [
        Tiled(make, block={"streaming": {"optimizer": {"fused": fused}}}) for fused in (True, False)
    ]


# -- a step that is not made ---------------------------------------------------------------------


def test_a_step_that_deepspeed_does_not_make_is_skipped_and_the_next_one_collects(
    optimizer: Tiled,
) -> None:
    skipped = optimizer.steps.current
    optimizer.steps.step(lambda: None)  # as after a norm that is not finite
    assert skipped.phase is StepPhase.SKIPPED
    assert optimizer.steps.current.phase is StepPhase.COLLECTING


def test_a_skipped_step_whose_call_ctrl_c_ended_is_not_made_by_another_call(
    optimizer: Tiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradients are gone, so that a second call would step with those of the step before."""
    steps, calls = optimizer.steps, []
    restart = steps.restart

    def interrupted() -> None:
        restart()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(steps, "restart", interrupted)
        with pytest.raises(KeyboardInterrupt):
            steps.step(lambda: None)  # as after a norm that is not finite
    steps.step(lambda: calls.append("again"))
    assert calls == []
    assert steps.current.phase is StepPhase.COLLECTING
    steps.step(lambda: calls.append("next"))
    assert calls == ["next"]


# -- where parameters are ------------------------------------------------------------------------


def test_members_are_where_deepspeed_has_the_parameters(optimizer: Tiled) -> None:
    for index in (0, 2):
        expected = optimizer.training.members[NAMES[index]]
        found = optimizer.upstream.members(index)
        assert [(m.offset, m.numel, m.dtype, m.key) for m in found] == [
            (m.offset, m.numel, m.dtype, m.key) for m in expected
        ]
        assert [m.tensor is None for m in found] == [m.tensor is None for m in expected]
    (whole,) = optimizer.upstream.members(FLAT)
    assert whole.tensor is optimizer.stage3.fp16_partitioned_groups_flat[FLAT]
    assert (whole.offset, whole.numel, whole.key) == (0, SIZES[NAMES[FLAT]], None)


def test_master_weights_are_made_of_the_parameters_without_a_buffer(optimizer: Tiled) -> None:
    optimizer.walk(gradients(0, BF16))  # gives the parameters values
    optimizer.groups.discard()
    for index, name in enumerate(NAMES):
        optimizer.steps.create_master(index, stock_unused)
        assert torch.equal(optimizer.training.master(name), optimizer.parameter(index).float())


def test_buffers_of_whole_sub_groups_take_no_memory(
    optimizer: Tiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, sizes = list[torch.Tensor](), [*SIZES.values(), 77]
    monkeypatch.setattr(tiled.dist, "get_rank", lambda: 0)

    def make() -> None:
        made.extend(torch.empty(size, device=OffloadDeviceEnum.cpu) for size in sizes)

    optimizer.steps.create_masters(make)
    assert [tensor.untyped_storage().nbytes() // 4 for tensor in made] == [1, 1, 1, 77]


# -- the step ------------------------------------------------------------------------------------


def test_a_first_step_for_which_the_drive_has_no_room_may_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    full, roomy = Tiled(DeepSpeedCPUAdam), Tiled(DeepSpeedCPUAdam)
    reserve, refused = full.training.store.reserve, []

    def refuse_once(*, key: str, nbytes: int) -> Any:
        if key.endswith("exp_avg_sq") and not refused:
            refused.append(key)
            raise StoreFullError(28, "no room")
        return reserve(key=key, nbytes=nbytes)

    monkeypatch.setattr(full.training.store, "reserve", refuse_once)
    with pytest.raises(StoreFullError):
        full.walk(gradients(0, BF16))
    full.steps.restart()
    for optimizer in (full, roomy):
        optimizer.walk(gradients(0, BF16))
    assert refused
    assert full.steps._fused.is_fused
    for name in NAMES:
        assert torch.equal(full.training.master(name), roomy.training.master(name)), name


def test_steps_under_upstreams_hooks_give_the_bits_of_whole_tensors(optimizer: Tiled) -> None:
    optimizer.stage3.clip_grad = 1.0
    weights = [torch.nn.Parameter(value.clone()) for value in optimizer.training.initial.values()]
    expected = adamw(weights)
    for step, norm in enumerate((0.5, 40.0)):  # the second is clipped
        values = gradients(step, BF16)
        optimizer.walk(values, norm)
        for weight, value in zip(weights, values.values(), strict=True):
            weight.grad = value.float().mul_(optimizer.upstream.gradient_factor(torch.tensor(norm)))
        expected.step()
    for index, (name, weight) in enumerate(zip(NAMES, weights, strict=True)):
        assert torch.equal(optimizer.training.master(name), weight)
        assert torch.equal(optimizer.parameter(index), weight.bfloat16())
        for state in ("exp_avg", "exp_avg_sq"):
            found = optimizer.training.master(name, state)
            assert torch.equal(found, expected.state[weight][state])
    assert optimizer.unflattened == [FLAT, FLAT]


def test_a_gradient_that_is_lost_stops_the_step_before_a_weight_changes(
    optimizer: Tiled,
) -> None:
    def fail() -> None:
        raise StoreError(5, "a gradient was not written")

    optimizer.runtime.staging = SimpleNamespace(wait_writes=fail)
    with pytest.raises(StoreError, match="a gradient"):
        optimizer.walk(gradients(0, BF16))
    optimizer.steps.settle()  # nothing is torn
    for name, weights in optimizer.training.initial.items():
        assert torch.equal(optimizer.training.master(name), weights)


@pytest.mark.parametrize(("fp32_states", "dtype"), [(True, FP32), (False, BF16)])
def test_states_begin_as_the_optimizer_would_make_them_in_its_dtype(
    fp32_states: bool, dtype: torch.dtype
) -> None:
    optimizer = Tiled(adamw, state_dtype=dtype)
    parameter = optimizer.masters[0]
    parameter.data = parameter.data.to(BF16)
    optimizer.stage3.master_weights_and_grads_dtype = BF16
    optimizer.base.fp32_optimizer_states = fp32_states
    optimizer.steps._make_state(0)
    states = optimizer.base.state[parameter]
    assert states["step"].item() == 0
    assert optimizer.groups.group(NAMES[0]).states == dict.fromkeys(
        ("exp_avg", "exp_avg_sq"), dtype
    )
    assert all(states[name].dtype == dtype for name in ("exp_avg", "exp_avg_sq"))
    assert not optimizer.training.master(NAMES[0], "exp_avg").any()


def test_states_that_are_there_stay(optimizer: Tiled) -> None:
    optimizer.steps._make_state(0)
    known = optimizer.base.state[optimizer.masters[0]]
    optimizer.steps._make_state(0)
    assert optimizer.base.state[optimizer.masters[0]] is known


def test_an_optimizer_that_is_not_known_makes_its_states_itself() -> None:
    kind: Any = type("Own", (torch.optim.AdamW,), {})
    optimizer = Tiled(kind)
    optimizer.steps._make_state(0)
    assert optimizer.groups.group(NAMES[0]).states == {}


@pytest.mark.parametrize(("kind", "is_anew"), [(torch.optim.Adagrad, True), (adamw, False)])
def test_only_adagrad_which_begins_at_its_construction_is_made_anew(
    kind: Any, is_anew: bool
) -> None:
    optimizer = Tiled(kind)
    before = optimizer.base
    optimizer.stage3._clear_fp32_optimizer_param_groups = lambda: [
        group.update(params=[]) for group in optimizer.base.param_groups
    ]
    optimizer.steps.initialize_states(stock_unused)
    assert (optimizer.base is not before) == is_anew
    assert [group["params"] for group in optimizer.base.param_groups] == [[]]
    assert optimizer.base.defaults == before.defaults


# -- single values -------------------------------------------------------------------------------


def test_a_value_that_an_accessor_changed_is_stored_once(optimizer: Tiled) -> None:
    optimizer.steps._make_state(0)
    for state in (None, "exp_avg"):
        before = optimizer.training.master(NAMES[0], state)
        part, group_index = optimizer.steps.values.state(None, False, state, stock_unused)
        assert group_index == 0
        assert torch.equal(part, before[100:106])
        part.fill_(7.0)
        assert torch.equal(optimizer.training.master(NAMES[0], state), before)
        optimizer.steps.values.put_back(stock_unused)
        before[100:106] = 7.0
        assert torch.equal(optimizer.training.master(NAMES[0], state), before)
        part.fill_(8.0)
        optimizer.steps.values.put_back(stock_unused)
        assert torch.equal(optimizer.training.master(NAMES[0], state), before)


def test_a_gradient_that_an_accessor_changed_is_what_the_step_sees(optimizer: Tiled) -> None:
    optimizer.gradient_stream.put(NAMES[0], 100, torch.arange(6.0))
    part, _ = optimizer.steps.values.gradient(None, False, stock_unused)
    assert part.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    part.neg_()
    optimizer.steps.values.put_back(stock_unused)
    found = torch.empty(6)
    optimizer.gradient_stream.get(NAMES[0], 100, found)
    assert found.tolist() == [-0.0, -1.0, -2.0, -3.0, -4.0, -5.0]


def test_an_update_that_is_nowhere_may_be_set_and_not_read(optimizer: Tiled) -> None:
    """It was applied as it was made: the value set stands in its place until a gradient arrives."""
    values = optimizer.steps.values
    optimizer.gradient_stream.put(NAMES[0], 100, torch.arange(6.0))
    optimizer.gradient_stream.note_replaced(NAMES[0], 100)
    with pytest.raises(GradientGoneError, match=r"after step\(\)"):
        values.gradient(None, True, stock_unused)
    with pytest.raises(GradientGoneError, match=r"after step\(\)"):
        values.update_gradients(torch.neg, [SimpleNamespace(requires_grad=True)], stock_unused)
    values.put_back(stock_unused)  # neither left anything to store
    part, _ = values.gradient(None, False, stock_unused)
    assert part.tolist() == [0.0] * 6
    part.fill_(3.0)
    values.put_back(stock_unused)
    found, _ = values.gradient(None, True, stock_unused)
    assert found.tolist() == [3.0] * 6


@pytest.mark.parametrize(
    ("rank", "expected"),
    [(0, [1.0] * 6), (1, [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]), (2, [0.0] * 6)],
)
def test_a_vectorized_update_leaves_the_padding_alone(
    optimizer: Tiled, rank: int, expected: list[float]
) -> None:
    """Nine elements over three ranks whose parts have six."""
    optimizer.gradient_stream.put(NAMES[0], 100, torch.zeros(6))
    stage3, values = optimizer.stage3, optimizer.steps.values
    stage3._fp32_state_allgather = lambda param, part: torch.zeros(3, 3)
    stage3._get_param_partition_rank = lambda param: rank
    stage3._get_fp32_grad_state_partition = lambda param, released: values.gradient(
        param, released, stock_unused
    )
    stage3._writeback_swap_state = lambda number, **_: values.put_back(stock_unused)
    frozen, trained = (SimpleNamespace(requires_grad=trains) for trains in (False, True))
    asked: list[Any] = []

    def update(full: torch.Tensor, param: Any) -> torch.Tensor:
        asked.append(param)
        return full + 1.0

    values.update_gradients(update, [frozen, trained], stock_unused)
    assert asked == [trained]
    found = torch.empty(6)
    optimizer.gradient_stream.get(NAMES[0], 100, found)
    assert found.tolist() == expected


# -- checkpoints ---------------------------------------------------------------------------------


class Reader:
    """The bytes of a tensor."""

    def __init__(self, values: torch.Tensor) -> None:
        self._bytes = values.view(torch.uint8)

    def fill(self, offset: int, target: torch.Tensor) -> None:
        target.copy_(self._bytes.narrow(0, offset, target.numel()))

    def close(self) -> None: ...


def test_what_is_stored_is_weights_first_and_then_states(optimizer: Tiled) -> None:
    ((state, dtype, read),) = optimizer.steps.stored("4_4")
    assert (state, dtype) == (None, FP32)
    weights = torch.cat([part.clone() for part in read()]).view(FP32)
    assert torch.equal(weights, optimizer.training.master("4_4"))
    optimizer.walk(gradients(0, BF16))
    assert [state for state, *_ in optimizer.steps.stored("4_4")] == [None, "exp_avg", "exp_avg_sq"]


def test_settled_states_are_in_the_store_though_no_step_wrote_them(optimizer: Tiled) -> None:
    optimizer.steps._make_state(0)
    optimizer.steps.settle()
    (read,) = [read for state, _, read in optimizer.steps.stored(NAMES[0]) if state == "exp_avg"]
    assert sum(part.numel() for part in read()) == 4 * SIZES[NAMES[0]]
    assert not any(part.any() for part in read())
    optimizer.steps.current.note_load()
    with pytest.raises(TornStepError):
        optimizer.steps.settle()


def test_a_load_replaces_weights_and_states_and_parameters_follow(optimizer: Tiled) -> None:
    optimizer.walk(gradients(0, BF16))
    optimizer.steps.begin_load()
    optimizer.steps.discard_states()
    assert list(optimizer.groups.group(NAMES[0]).states) == []
    optimizer.base.state.clear()
    values = {name: torch.randn(numel) for name, numel in SIZES.items()}
    moments = {name: torch.rand(numel) for name, numel in SIZES.items()}
    for index, name in enumerate(NAMES):
        optimizer.steps.load_tensor(LoadedTensor(index, None, FP32, Reader(values[name])))
        optimizer.steps.load_tensor(LoadedTensor(index, "exp_avg", FP32, Reader(moments[name])))
    with pytest.raises(TornStepError):
        optimizer.steps.settle()
    optimizer.unflattened.clear()
    optimizer.steps.refresh(stock_unused)
    optimizer.steps.mend()
    optimizer.steps.settle()
    for index, name in enumerate(NAMES):
        assert torch.equal(optimizer.training.master(name), values[name])
        assert torch.equal(optimizer.training.master(name, "exp_avg"), moments[name])
        assert torch.equal(optimizer.parameter(index), values[name].bfloat16())
    assert optimizer.unflattened == [FLAT]
    state = optimizer.base.state[optimizer.masters[0]]
    assert state["exp_avg"].numel() == 0


def test_a_last_write_that_fails_tears_the_step(
    optimizer: Tiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    drain, phases = optimizer.stream.drain, list[StepPhase]()

    def fail_at_the_end() -> None:
        drain()
        phases.append(optimizer.steps.current.phase)
        if phases[-1] is StepPhase.DONE:
            raise StoreError(5, "the last tile was not written")

    monkeypatch.setattr(optimizer.stream, "drain", fail_at_the_end)
    with pytest.raises(StoreError, match="the last tile"):
        optimizer.walk(gradients(0, BF16))
    assert StepPhase.DONE in phases
    assert optimizer.steps.current.is_mixed
    with pytest.raises(TornStepError):
        optimizer.steps.settle()


def test_what_failed_before_a_load_does_not_matter(
    optimizer: Tiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise StoreError(5, "a tile was not written")

    monkeypatch.setattr(optimizer.stream, "drain", fail)
    optimizer.steps.begin_load()
    assert optimizer.steps.current.is_mixed


# -- construction and the end --------------------------------------------------------------------


def test_deepspeeds_cpu_adam_is_fused_and_gives_the_bits_of_its_own_step() -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    both = fused_and_own(lambda params: DeepSpeedCPUAdam(params, weight_decay=0.1))
    for step in range(3):
        for optimizer in both:
            optimizer.stage3.clip_grad = float(step)
            optimizer.walk(gradients(step, BF16), norm=10.0)
    assert [one.steps._fused.is_fused for one in both] == [True, False]
    for index, name in enumerate(NAMES):
        parameters = [optimizer.masters[index] for optimizer in both]
        for state in (None, "exp_avg", "exp_avg_sq"):
            ours, theirs = (optimizer.training.master(name, state) for optimizer in both)
            assert torch.equal(ours, theirs), (name, state)
        assert torch.equal(both[0].parameter(index), both[1].parameter(index))
        states = [
            optimizer.base.state[parameter]
            for optimizer, parameter in zip(both, parameters, strict=True)
        ]
        assert list(states[0]) == list(states[1])
        assert states[0]["step"] == states[1]["step"] == 3


@pytest.mark.parametrize("is_on", [True, False])
def test_the_block_may_turn_fusing_off(is_on: bool) -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer = Tiled(DeepSpeedCPUAdam, block={"streaming": {"optimizer": {"fused": is_on}}})
    assert optimizer.steps._fused.is_fused == is_on


def test_what_is_replayed_after_a_load_is_replayed_for_the_fused_step_too() -> None:
    """Powers that are multiplied up differ from those of pow(): a resumed run would show it."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    both = fused_and_own(lambda params: DeepSpeedCPUAdam(params, weight_decay=0.1))
    for optimizer in both:
        optimizer.walk(gradients(0, BF16))
        for parameter in optimizer.masters:
            optimizer.base.state[parameter]["step"] = 100
        replay_beta_powers(optimizer.upstream, optimizer.steps.powers)
        optimizer.walk(gradients(1, BF16))
    for name in NAMES:
        ours, theirs = (optimizer.training.master(name) for optimizer in both)
        assert torch.equal(ours, theirs), name


def test_after_a_step_of_its_own_an_optimizer_is_never_fused_again() -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer = Tiled(DeepSpeedCPUAdam)
    assert optimizer.steps._fused.is_fused
    handle = optimizer.base.register_step_post_hook(lambda *_: None)
    optimizer.walk(gradients(0, BF16))
    handle.remove()
    assert not optimizer.steps._fused.is_fused
    optimizer.walk(gradients(1, BF16))
    assert not optimizer.steps._fused.is_fused


@pytest.mark.parametrize(("rank", "is_said"), [(0, True), (1, False)])
@pytest.mark.parametrize("kind", [adamw, type("Own", (torch.optim.AdamW,), {})])
def test_only_an_optimizer_that_needs_sub_groups_whole_is_warned_of(
    kind: Any,
    rank: int,
    is_said: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tiled.dist, "get_rank", lambda: rank)
    optimizer = Tiled(kind)
    runtime: Any = optimizer.runtime
    runtime.open_optimizer = functools.partial(Runtime.open_optimizer, runtime)
    optimizer.steps.configure(None, None)
    runtime.optimizer = runtime._optimizer
    assert isinstance(optimizer.stage3.optimizer_swapper, StreamedSwapper)
    assert ("is not known" in caplog.text) == (is_said and kind is not adamw)
    # From now on its own: the sub-groups that are made go there.
    optimizer.steps.create_master(FLAT, stock_unused)
    assert runtime.optimizer.groups.contains(NAMES[FLAT])
    assert not runtime.optimizer.groups.contains(NAMES[0])


def test_at_the_end_the_drives_space_goes_back(optimizer: Tiled) -> None:
    optimizer.walk(gradients(0, BF16))
    keys = [key for name in NAMES for key in optimizer.groups.group(name).all_keys]
    assert len(keys) == 9
    optimizer.steps.discard(None)
    store = optimizer.training.store
    assert not any(store.discard(key=key) for key in keys)
