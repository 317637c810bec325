"""Which kind of optimizer a config makes, what is refused before, and what is ignored."""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.runtime.base_optimizer import BackwardHookStateManager
from deepspeed.runtime.zero.stage3 import IPGBucketZ3

from memascend.config.block import parse_block
from memascend.config.deepspeed import parse_deepspeed
from memascend.deepspeed.optimizer import optimizer as zero_optimizer
from memascend.deepspeed.optimizer.gradients import FlatGradients, StreamedGradients
from memascend.deepspeed.optimizer.optimizer import (
    FlatTiledOptimizer,
    FlatWholeOptimizer,
    StreamedTiledOptimizer,
    StreamedWholeOptimizer,
    ZeroOptimizer,
)
from memascend.deepspeed.optimizer.passes import BackwardPasses
from memascend.deepspeed.optimizer.steps import WholeSteps
from memascend.deepspeed.optimizer.tiled_steps import TiledSteps
from memascend.deepspeed.parameters.swapper import ParameterSwapper
from memascend.errors import ConfigError, IncompleteGradientError
from memascend.plan.derive import PlanRequest, derive
from tests.support.plan_models import decoder

ON_DRIVE = SimpleNamespace(device="nvme")
KINDS: dict[tuple[bool, bool], type[ZeroOptimizer]] = {
    (True, True): StreamedTiledOptimizer,
    (True, False): StreamedWholeOptimizer,
    (False, True): FlatTiledOptimizer,
    (False, False): FlatWholeOptimizer,
}


def made(block: dict[str, Any], **keywords: Any) -> Any:
    arguments = ("module", None, "names", "timers", {"memascend": block})
    return ZeroOptimizer.__new__(ZeroOptimizer, *arguments, **keywords)


def in_backward() -> Any:
    """An optimizer with one gradient that waits in its bucket."""
    optimizer = made({}, offload_optimizer_config=ON_DRIVE, offload_ratio=1.0)
    optimizer.passes = BackwardPasses()
    param = SimpleNamespace(grad=torch.ones(2))
    bucket = IPGBucketZ3(params=[param], elements=2)  # type: ignore[list-item]
    optimizer.fp16_groups, optimizer.ipg_buckets = [[param]], {torch.bfloat16: bucket}
    optimizer._backward_hook_state = BackwardHookStateManager()
    optimizer.micro_step_id = 0
    return optimizer


# -- kinds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gradients", "optimizer"), KINDS)
def test_the_streams_of_the_block_decide(gradients: bool, optimizer: bool) -> None:
    streaming = {"gradients": {"enabled": gradients}, "optimizer": {"enabled": optimizer}}
    found = made({"streaming": streaming}, offload_optimizer_config=ON_DRIVE, offload_ratio=1.0)
    assert type(found) is KINDS[gradients, optimizer]
    assert (found.streams_gradients, found.streams_optimizer) == (gradients, optimizer)
    assert isinstance(found, ZeroOptimizer)
    assert isinstance(found, StreamedGradients if gradients else FlatGradients)
    assert isinstance(found, TiledSteps if optimizer else WholeSteps)


def test_an_optimizer_in_memory_takes_deepspeeds_own_ways() -> None:
    assert type(made({})) is FlatWholeOptimizer


def test_a_kind_is_constructed_with_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    stock = zero_optimizer.DeepSpeedZeroOptimizer_Stage3
    monkeypatch.setattr(stock, "__init__", lambda self, *a, **k: given.append((self, a, k)))
    model = torch.nn.Linear(2, 2)
    base = torch.optim.SGD(model.parameters())
    ds_config: dict[str, Any] = {"memascend": {"streaming": {"optimizer": {"enabled": False}}}}
    found = ZeroOptimizer(
        model,
        base,
        {},
        timers=None,
        ds_config=ds_config,
        offload_optimizer_config=ON_DRIVE,
        offload_ratio=1.0,
    )
    assert type(found) is StreamedWholeOptimizer
    keywords = {"offload_optimizer_config": ON_DRIVE, "offload_ratio": 1.0}
    assert given == [(found, (model, base, {}, None, ds_config), keywords)]


@pytest.mark.parametrize("again", [copy.copy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.__name__)
def test_a_kind_is_copied_and_pickled_as_itself(kind: type, again: Any) -> None:
    one: Any = kind.__new__(kind)
    one.noted = [1, 2]
    other = again(one)
    assert type(other) is kind
    assert vars(other) == {"noted": [1, 2]}


# -- refusals ------------------------------------------------------------------------------------


def test_a_model_from_several_contexts_is_refused() -> None:
    """DeepSpeed gives mixed lists to the first parameter's swapper: the others would not train."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    first, second = (ParameterSwapper.__new__(ParameterSwapper) for _ in range(2))
    for param in model.parameters():
        param.nvme_swapper = first  # type: ignore[attr-defined]
    zero_optimizer._refuse_several_contexts(model)
    for param in model[1].parameters():
        param.nvme_swapper = second  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"2 deepspeed\.zero\.Init contexts"):
        zero_optimizer._refuse_several_contexts(model)


def test_a_model_without_a_trainable_parameter_is_refused() -> None:
    """DeepSpeed fails with "max() arg is an empty sequence"."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model[0].parameters())
    model[0].weight.requires_grad_(False)
    zero_optimizer._refuse_nothing_to_train(model, optimizer)
    model[0].bias.requires_grad_(False)
    told = r"none of the 2 tensors given to AdamW .* of the model's 4 tensors 2 do.*fix: "
    with pytest.raises(ConfigError, match=told):
        ZeroOptimizer(model, optimizer, {}, None, {"memascend": {}})


@pytest.mark.parametrize("kind", ["int8", "int64", "bool", "float8_e4m3fn", "complex64"])
def test_a_first_parameter_that_cannot_be_trained_is_refused(kind: str) -> None:
    """DeepSpeed would keep all weights in its dtype; CPU offload ends in an error of torch's."""
    packed = torch.nn.Parameter(torch.zeros(8).to(getattr(torch, kind)), requires_grad=False)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([*model.parameters(), packed])
    zero_optimizer._refuse_dtypes(optimizer)
    optimizer = torch.optim.AdamW([packed, *model.parameters()])
    told = rf"first parameter is torch\.{kind}, .* are torch\.float32.*fix: model_parameters=\[p"
    with pytest.raises(ConfigError, match=told):
        ZeroOptimizer(model, optimizer, {}, None, {"memascend": {}})


def test_a_part_in_double_precision_is_refused_and_a_whole_model_is_not() -> None:
    """A tile has no room to cast to a second dtype."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).double())
    with pytest.raises(ConfigError, match=r"are torch\.float32, torch\.float64"):
        zero_optimizer._refuse_dtypes(torch.optim.AdamW(model.parameters()))
    zero_optimizer._refuse_dtypes(torch.optim.AdamW(model.double().parameters()))


@pytest.mark.parametrize(("rank", "count"), [(0, 1), (1, 0)])
@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("offload_optimizer", "fast_init", True), ("offload_param", "max_in_cpu", 10**6)],
)
def test_a_stated_key_that_is_ignored_is_warned_of_on_rank_0(
    section: str,
    key: str,
    value: object,
    rank: int,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    optimizer = made({"host_memory_limit": "1GiB"})
    optimizer.settings = parse_deepspeed({"zero_optimization": {section: {key: value}}})
    optimizer.params_in_nvme_and_cpu = True
    optimizer.offload_optimizer_fast_init = key == "fast_init"
    optimizer.max_params_in_cpu = 10**6
    stock = zero_optimizer.DeepSpeedZeroOptimizer_Stage3
    monkeypatch.setattr(stock, "_configure_offloading", lambda *arguments: None)
    monkeypatch.setattr(zero_optimizer.dist, "get_rank", lambda: rank)
    # As a script without logging leaves it: INFO is not shown.
    with caplog.at_level(logging.WARNING, logger="memascend"):
        optimizer._configure_offloading(None, None)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * count
    assert caplog.text.count(f"zero_optimization.{section}.{key} is ignored") == count
    assert optimizer.offload_optimizer_fast_init is False
    assert optimizer.max_params_in_cpu == 0


@pytest.mark.parametrize(
    ("new_event", "allocator", "is_for_nothing"),
    [
        (None, {}, True),
        (torch.cuda.Event, {}, False),  # a device copies
        (None, {"page_lock": True}, False),  # the block says it, not DeepSpeed's key
        (None, {"enabled": False}, False),
    ],
)
def test_memory_that_the_json_locks_for_no_device_is_said(
    new_event: Any, allocator: dict[str, Any], is_for_nothing: bool
) -> None:
    zero = {"stage": 3, "offload_param": {"device": "nvme", "pin_memory": True}}
    stand_in: Any = SimpleNamespace(
        module=torch.nn.Linear(8, 8),
        attachment=SimpleNamespace(runtime=SimpleNamespace(new_event=new_event)),
        _config=parse_block({"allocator": allocator}),
        settings=parse_deepspeed({"zero_optimization": zero}),
    )
    lines = ZeroOptimizer._advice(stand_in, derive(decoder(), request=PlanRequest()))
    assert "host_memory_limit" in lines[0]
    assert any("pin_memory locks" in line for line in lines) == is_for_nothing


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
    optimizer.passes._has_failed = has_failed
    optimizer._backward_active_depth = depth
    state = optimizer._backward_hook_state
    state.backward_seen_this_step, state.epilogue_ran_this_backward = True, not left
    begun_anew: list[bool] = []
    optimizer._end_step = lambda: begun_anew.append(True)
    optimizer.clear_backward_seen_flag()
    assert (param.grad is None, bucket.params == []) == (left, left)
    assert begun_anew == [True] * left
    assert optimizer.micro_step_id == (not left)
    assert optimizer._backward_active_depth == 0
    assert not state.backward_seen_this_step
    assert not optimizer.passes.was_left()


def test_a_step_with_gradients_that_nobody_reduced_is_refused() -> None:
    """Upstream would drop them and work on those of the step before."""
    with pytest.raises(IncompleteGradientError):
        in_backward().step()


def test_a_forward_pass_inside_a_backward_pass_keeps_its_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dropped, training would go on with a part of the gradients."""
    optimizer = in_backward()
    stock = zero_optimizer.DeepSpeedZeroOptimizer_Stage3
    reduced: list[bool] = []

    def reduce(self: Any) -> None:
        reduced.append(True)
        self._epilogue_ran_this_backward = True

    monkeypatch.setattr(stock, "independent_gradient_partition_epilogue", reduce)
    loss = torch.ones((), requires_grad=True) * 1.0
    loss.register_hook(lambda _: optimizer.passes.enter() and None)
    loss.register_hook(lambda _: optimizer.clear_backward_seen_flag())
    loss.backward()
    assert optimizer.fp16_groups[0][0].grad is not None
    assert (reduced, optimizer.micro_step_id) == ([True], 0)


@pytest.mark.parametrize(("calls", "depth", "is_over"), [(2, 3, False), (1, 1, True)])
def test_the_end_of_a_call_inside_another_keeps_its_gradients_and_is_no_end(
    calls: int, depth: int, is_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = in_backward()
    stock = zero_optimizer.DeepSpeedZeroOptimizer_Stage3

    def reduce(self: Any) -> None:
        self.passes.note_reduced([1])
        self._epilogue_ran_this_backward = True

    monkeypatch.setattr(stock, "independent_gradient_partition_epilogue", reduce)
    optimizer._backward_active_depth = 3
    with contextlib.ExitStack() as stack:
        for _ in range(calls):
            stack.enter_context(optimizer.passes.calling())
        optimizer.independent_gradient_partition_epilogue()
    state = optimizer._backward_hook_state
    assert (optimizer._backward_active_depth, state.epilogue_ran_this_backward) == (depth, is_over)
    assert optimizer.passes.adds(1) == (not is_over)


def test_parameters_of_earlier_passes_are_added_to_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that has no gradient of this step yet still holds that of the step before."""
    optimizer = in_backward()
    stored: list[tuple[list[int], list[str], int]] = []

    def store(self: Any, params: Any, partitions: Any) -> list[Any]:
        stored.append(([param.ds_id for param in params], partitions, self.micro_step_id))
        return list(partitions)

    monkeypatch.setattr(StreamedGradients, "partition_grads", store)
    params = [SimpleNamespace(ds_id=number) for number in range(3)]
    optimizer.passes.note_reduced([1])
    optimizer.passes.keep()
    optimizer.partition_grads(params, ["zero", "one", "two"])
    assert stored == [([0, 2], ["zero", "two"], 0), ([1], ["one"], 1)]
    optimizer.passes.keep()
    assert [optimizer.passes.adds(number) for number in range(4)] == [True, True, True, False]
