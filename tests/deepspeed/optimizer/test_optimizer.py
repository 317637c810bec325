"""Which members an optimizer gets, what it passes to them, and that DeepSpeed's class stays."""

from __future__ import annotations

import contextlib
import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.runtime.base_optimizer import BackwardHookStateManager
from deepspeed.runtime.zero.stage3 import IPGBucketZ3

from memascend.deepspeed.optimizer import optimizer as zero_optimizer
from memascend.deepspeed.optimizer.gradients import FlatGradients, StreamedGradients
from memascend.deepspeed.optimizer.optimizer import ZeroOptimizer
from memascend.deepspeed.optimizer.tiled import TiledSteps
from memascend.deepspeed.optimizer.whole import WholeSteps
from memascend.errors import ConfigError, IncompleteGradientError, TornStepError

ON_DRIVE = SimpleNamespace(device="nvme")
Stock = zero_optimizer.DeepSpeedZeroOptimizer_Stage3


@pytest.fixture(autouse=True)
def without_model(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Leave DeepSpeed's constructor out; return what it is given."""
    given: list[Any] = []
    monkeypatch.setattr(Stock, "__init__", lambda self, *a, **k: given.append((self, a, k)))
    return given


MODEL = torch.nn.Linear(2, 2)
BASE = torch.optim.SGD(MODEL.parameters())


def made(block: dict[str, Any], **keywords: Any) -> Any:
    return ZeroOptimizer(MODEL, BASE, {}, timers=None, ds_config={"memascend": block}, **keywords)


def in_backward() -> Any:
    """An optimizer with one gradient that waits in its bucket."""
    optimizer = made({}, offload_optimizer_config=ON_DRIVE, offload_ratio=1.0)
    param = SimpleNamespace(grad=torch.ones(2))
    bucket = IPGBucketZ3(params=[param], elements=2)  # type: ignore[list-item]
    optimizer.fp16_groups, optimizer.ipg_buckets = [[param]], {torch.bfloat16: bucket}
    optimizer._backward_hook_state = BackwardHookStateManager()
    optimizer.micro_step_id = 0
    optimizer.gradients.finish_pass = lambda: None  # there is no runtime
    return optimizer


# -- members -------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("optimizer", [True, False])
def test_the_streams_of_the_block_decide(gradients: bool, optimizer: bool) -> None:
    streaming = {"gradients": {"enabled": gradients}, "optimizer": {"enabled": optimizer}}
    found = made({"streaming": streaming}, offload_optimizer_config=ON_DRIVE, offload_ratio=1.0)
    assert type(found) is ZeroOptimizer
    assert (found.gradients.is_streamed, found.steps.is_tiled) == (gradients, optimizer)
    assert isinstance(found.gradients, StreamedGradients if gradients else FlatGradients)
    assert isinstance(found.steps, TiledSteps if optimizer else WholeSteps)


def test_an_optimizer_in_memory_takes_deepspeeds_own_ways() -> None:
    found = made({})
    assert isinstance(found.gradients, FlatGradients)
    assert isinstance(found.steps, WholeSteps)


def test_a_backward_pass_comes_before_another_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a step whose call Ctrl-C ended would be taken for called again."""
    monkeypatch.setattr(Stock, "independent_gradient_partition_epilogue", lambda self: None)
    optimizer = in_backward()
    step = optimizer.steps.current
    step.call()
    step.decide(["a"])
    step.note_change()
    step.note_stepped()
    assert step.was_cut
    optimizer._reduce_rest()
    assert not step.was_cut


def test_all_gradients_at_once_are_refused_by_name_on_a_drive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Stock, "get_fp32_grad_partitions", lambda self: "all")
    optimizer = made({})
    optimizer.swap_optimizer = False
    assert optimizer.get_fp32_grad_partitions() == "all"
    optimizer.swap_optimizer = True
    with pytest.raises(ConfigError, match=r"get_fp32_grad_partitions\(\) .*safe_get_full_grad"):
        optimizer.get_fp32_grad_partitions()


def test_parameters_of_a_torn_step_are_gathered_by_a_load_alone() -> None:
    optimizer = made({})
    optimizer.steps.current.note_load()
    with pytest.raises(TornStepError, match="load a checkpoint"):
        optimizer.check_values()
    with optimizer.checkpoint.active():
        optimizer.check_values()


def test_deepspeeds_class_is_constructed_with_what_was_given(without_model: list[Any]) -> None:
    ds_config: dict[str, Any] = {"memascend": {"streaming": {"optimizer": {"enabled": False}}}}
    keywords = {"offload_optimizer_config": ON_DRIVE, "offload_ratio": 1.0}
    found = ZeroOptimizer(MODEL, BASE, {}, timers=None, ds_config=ds_config, **keywords)
    assert isinstance(found.steps, WholeSteps)
    assert without_model == [(found, (MODEL, BASE, {}, None, ds_config), keywords)]


@pytest.mark.parametrize("again", [copy.copy, lambda one: pickle.loads(pickle.dumps(one))])
def test_an_optimizer_is_copied_and_pickled_as_itself(again: Any) -> None:
    one: Any = ZeroOptimizer.__new__(ZeroOptimizer)
    one.noted = [1, 2]
    other = again(one)
    assert type(other) is ZeroOptimizer
    assert vars(other) == {"noted": [1, 2]}


# -- backward passes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("has_failed", "depth", "left"),
    [(True, 1, True), (False, 1, True), (False, 0, False)],
    ids=["an error", "a pass that was not reduced", "nothing"],
)
def test_the_next_forward_pass_drops_what_an_error_has_left_and_nothing_else(
    has_failed: bool, depth: int, left: bool
) -> None:
    optimizer = in_backward()
    (param,), bucket = optimizer.fp16_groups[0], optimizer.ipg_buckets[torch.bfloat16]
    optimizer.passes.passes._has_failed = has_failed
    optimizer._backward_active_depth = depth
    state = optimizer._backward_hook_state
    state.backward_seen_this_step, state.epilogue_ran_this_backward = True, not left
    begun_anew: list[bool] = []
    optimizer.passes._restart = lambda: begun_anew.append(True)
    optimizer.clear_backward_seen_flag()
    assert (param.grad is None, bucket.params == []) == (left, left)
    assert begun_anew == [True] * left
    assert optimizer.micro_step_id == (not left)
    assert optimizer._backward_active_depth == 0
    assert not state.backward_seen_this_step
    assert not optimizer.passes.passes.was_left()


def test_a_step_with_gradients_that_nobody_reduced_is_refused() -> None:
    """Upstream would drop them and work on those of the step before."""
    with pytest.raises(IncompleteGradientError):
        in_backward().step()


def test_a_step_that_runs_out_of_device_memory_is_noted() -> None:
    """Other ranks wait for this one's part of a matrix of Muon."""
    optimizer, noted, error = made({}), [], torch.OutOfMemoryError("no room")

    def step(_: object) -> None:
        raise error

    failures = SimpleNamespace(note=noted.append)
    optimizer._construction = SimpleNamespace(attach=lambda: SimpleNamespace(failures=failures))
    optimizer.passes = SimpleNamespace(check=lambda: None)
    optimizer.steps = SimpleNamespace(step=step)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    assert noted == [error]


def test_a_forward_pass_inside_a_backward_pass_keeps_its_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dropped, training would go on with a part of the gradients."""
    optimizer = in_backward()
    reduced: list[bool] = []

    def reduce(self: Any) -> None:
        reduced.append(True)
        self._epilogue_ran_this_backward = True

    monkeypatch.setattr(Stock, "independent_gradient_partition_epilogue", reduce)
    loss = torch.ones((), requires_grad=True) * 1.0
    loss.register_hook(lambda _: optimizer.passes.passes.enter() and None)
    loss.register_hook(lambda _: optimizer.clear_backward_seen_flag())
    loss.backward()
    assert optimizer.fp16_groups[0][0].grad is not None
    assert (reduced, optimizer.micro_step_id) == ([True], 0)


@pytest.mark.parametrize(("calls", "depth", "is_over"), [(2, 3, False), (1, 1, True)])
def test_the_end_of_a_call_inside_another_keeps_its_gradients_and_is_no_end(
    calls: int, depth: int, is_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = in_backward()

    def reduce(self: Any) -> None:
        self.passes.passes.note_reduced([1])
        self._epilogue_ran_this_backward = True

    monkeypatch.setattr(Stock, "independent_gradient_partition_epilogue", reduce)
    optimizer._backward_active_depth = 3
    with contextlib.ExitStack() as stack:
        for _ in range(calls):
            stack.enter_context(optimizer.passes.passes.calling())
        optimizer.independent_gradient_partition_epilogue()
    state = optimizer._backward_hook_state
    assert (optimizer._backward_active_depth, state.epilogue_ran_this_backward) == (depth, is_over)
    assert optimizer.passes.passes.adds(1) == (not is_over)


def test_parameters_of_earlier_passes_are_added_to_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that has no gradient of this step yet still holds that of the step before."""
    optimizer = in_backward()
    stored: list[tuple[list[int], list[str], int]] = []

    def store(self: Any, params: Any, partitions: Any, original: Any) -> list[Any]:
        stored.append(([param.ds_id for param in params], partitions, optimizer.micro_step_id))
        return list(partitions)

    monkeypatch.setattr(StreamedGradients, "put", store)
    params = [SimpleNamespace(ds_id=number) for number in range(3)]
    optimizer.passes.passes.note_reduced([1])
    optimizer.passes.passes.keep()
    optimizer.partition_grads(params, ["zero", "one", "two"])
    assert stored == [([0, 2], ["zero", "two"], 0), ([1], ["one"], 1)]
    optimizer.passes.passes.keep()
    assert [optimizer.passes.passes.adds(number) for number in range(4)] == [
        True,
        True,
        True,
        False,
    ]
