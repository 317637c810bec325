"""A gradient is ready when nothing more comes: in the last slice, or at the end of the pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memascend.slices.cut import CannotCut

pytestmark = pytest.mark.deepspeed


class Reduction:
    """Takes gradients instead of DeepSpeed."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.reduced: list[Any] = []
        self.in_bucket: list[Any] = []
        self.flushed = 0
        self.all_params = [param for param in module.parameters() if param.requires_grad]

    def reduce(self, param: Any) -> None:
        assert param.ds_grad_is_ready
        self.reduced.append(param)

    def is_in_bucket(self, param: Any) -> bool:
        return any(param is one for one in self.in_bucket)

    def reduce_buckets(self) -> None:
        self.flushed += 1

    def widen_gradient(self, param: Any) -> None:
        param.is_widened = True

    accumulation_dtype = torch.float32


class Model(torch.nn.Module):
    """Two layers and a weight that both have."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.other.weight = self.one.weight
        self.one.bias.requires_grad_(False)
        for number, param in enumerate(self.parameters()):
            param.ds_id = number


@pytest.fixture
def reduction() -> Reduction:
    return Reduction(Model())


@pytest.fixture
def gradients(reduction: Reduction) -> Any:
    from memascend.deepspeed.slices.held import HeldParameters
    from memascend.deepspeed.slices.weights import PassGradients

    found = PassGradients(reduction, HeldParameters())
    found.begin()
    return found


def test_a_gradient_is_ready_in_the_last_slice(reduction: Reduction, gradients: Any) -> None:
    bias: Any = reduction.module.other.bias
    weights = gradients.weights_of([bias, reduction.module.one.bias])
    with weights.in_backward(3) as begin_slice:
        ready = []
        for number in range(3):
            begin_slice(number)
            ready.append(bias.ds_grad_is_ready)
    assert ready == [False, False, True]
    assert bias.is_widened
    assert not hasattr(reduction.module.one.bias, "ds_grad_is_ready")  # frozen
    assert reduction.reduced == []


def test_a_gradient_that_the_last_slice_does_not_bring_is_passed_on(
    reduction: Reduction, gradients: Any
) -> None:
    bias: Any = reduction.module.other.bias
    bias.grad = torch.ones(2)
    for in_bucket in ([bias], []):
        reduction.in_bucket = in_bucket
        with gradients.weights_of([bias]).in_backward(2):
            pass
        assert len(reduction.reduced) == (in_bucket == [])
        gradients.begin()


def test_an_error_passes_nothing_on(reduction: Reduction, gradients: Any) -> None:
    bias: Any = reduction.module.other.bias
    bias.grad = torch.ones(2)
    with pytest.raises(ZeroDivisionError), gradients.weights_of([bias]).in_backward(2) as begin:
        begin(1 // 0)
    assert reduction.reduced == []
    assert bias.ds_grad_is_ready


@pytest.mark.parametrize("times", [1, 2])
def test_what_is_used_again_waits_for_the_end_of_the_pass(
    reduction: Reduction, gradients: Any, times: int
) -> None:
    """A weight of two modules always does; one of a module that is called twice from then on."""
    param: Any = reduction.module.one.weight if times == 1 else reduction.module.other.bias
    calls = [gradients.weights_of([param]) for _ in range(times)]
    param.grad = torch.ones_like(param)
    for weights in calls:
        with weights.in_backward(1) as begin_slice:
            begin_slice(0)
            assert not param.ds_grad_is_ready
        assert not param.ds_grad_is_ready
    assert reduction.reduced == []
    gradients.deliver_late()
    assert [one is param for one in reduction.reduced] == [True]
    gradients.begin()
    assert param.ds_grad_is_ready == (times == 2)


def test_two_graphs_at_once_use_everything_twice(reduction: Reduction, gradients: Any) -> None:
    bias: Any = reduction.module.other.bias
    first = gradients.weights_of([bias])
    gradients.begin()  # another forward pass, while the first has no backward
    second = gradients.weights_of([bias])
    for weights in (second, first):
        with weights.in_backward(1) as begin_slice:
            begin_slice(0)
            assert not bias.ds_grad_is_ready
    del first, second, weights
    gradients.begin()
    with gradients.weights_of([bias]).in_backward(1) as begin_slice:
        begin_slice(0)
        assert bias.ds_grad_is_ready


def test_a_graph_that_a_script_keeps_is_named_once(
    reduction: Reduction, gradients: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bias: Any = reduction.module.other.bias
    kept = gradients.weights_of([bias])
    counts = []
    for _ in range(4):
        gradients.begin()
        with gradients.weights_of([bias]).in_backward(1) as begin_slice:
            begin_slice(0)
        gradients.note_step()
        counts.append(caplog.text.count("1 step(s) ago has had no backward pass"))
    assert counts == [0, 1, 1, 1]
    assert "stay on the device" in caplog.text
    assert "loss.detach()" in caplog.text
    del kept


def test_a_graph_of_the_same_step_is_none_that_a_script_keeps(
    gradients: Any, reduction: Reduction, caplog: pytest.LogCaptureFixture
) -> None:
    """As of two forward passes before one backward pass, in each step."""
    for _ in range(4):
        first = gradients.weights_of([reduction.module.other.bias])
        gradients.begin()
        gradients.begin()
        with first.in_backward(1) as begin_slice:
            begin_slice(0)
        gradients.note_step()
    assert caplog.text == ""


def test_sums_of_slices_are_complete_with_the_last(reduction: Reduction) -> None:
    from memascend.deepspeed.slices.held import HeldParameters
    from memascend.deepspeed.slices.weights import PassGradients

    found = PassGradients(reduction, HeldParameters(), by_slice=True)
    found.begin()
    bias: Any = reduction.module.other.bias
    other: Any = reduction.module.other.weight
    assert found.sums is not None
    with found.weights_of([bias]).in_backward(3) as begin_slice:
        for number in range(3):
            begin_slice(number)
            assert bias.ds_grad_is_ready
            assert reduction.flushed == number + 1
            bias.grad = torch.ones(2)
            arrived = torch.full((1,), 2.0**number, dtype=torch.bfloat16)
            params, parts = found.sums.take([bias, other], [arrived, arrived])
            if number < 2:
                assert [one is other for one in params] == [True]
                assert bias.grad is None
            arrived.fill_(-1.0)  # DeepSpeed uses its buffer again
    assert [one is bias for one in params] == [True, False]
    assert (parts[0].item(), parts[0].dtype) == (7.0, torch.float32)
    assert not hasattr(bias, "is_widened")


def test_a_rank_with_fewer_slices_reduces_zeros_in_the_same_buckets(reduction: Reduction) -> None:
    from memascend.deepspeed.slices.held import HeldParameters
    from memascend.deepspeed.slices.weights import PassGradients

    weight: Any = torch.nn.Parameter(torch.ones(3))
    bias: Any = reduction.module.other.bias
    weight.ds_id = 9
    reduction.all_params.append(weight)
    found = PassGradients(reduction, HeldParameters(), by_slice=True)
    found.begin()
    found.slice_count = 3  # another rank has so many
    reduced: list[list[float]] = []
    completed: list[Any] = []

    def reduce_buckets() -> None:
        if reduction.in_bucket:
            assert found.sums is not None
            reduced.append([one.grad[0].item() for one in reduction.in_bucket])
            parts = [one.grad.clone() for one in reduction.in_bucket]
            completed.extend(found.sums.take(reduction.in_bucket, parts)[0])
            for one in reduction.in_bucket:
                one.grad = None
            reduction.in_bucket = []

    reduction.reduce = lambda param: reduction.in_bucket.append(param)  # type: ignore[method-assign]
    reduction.reduce_buckets = reduce_buckets  # type: ignore[method-assign]
    with found.weights_of([bias, weight]).in_backward(1) as begin_slice:
        begin_slice(0)
        for one in (weight, bias):  # each has a bucket of its own
            reduce_buckets()
            one.grad = torch.ones_like(one)
            reduction.reduce(one)
    reduce_buckets()
    assert reduced == [[1.0], [1.0], [0.0], [0.0], [0.0], [0.0]]
    assert [one.ds_id for one in completed] == [weight.ds_id, bias.ds_id], "after three slices"


def test_a_sum_whose_last_slice_brings_nothing_gets_zeros(reduction: Reduction) -> None:
    from memascend.deepspeed.slices.held import HeldParameters
    from memascend.deepspeed.slices.weights import PassGradients

    found = PassGradients(reduction, HeldParameters(), by_slice=True)
    found.begin()
    bias: Any = reduction.module.other.bias
    assert found.sums is not None
    with found.weights_of([bias]).in_backward(2) as begin_slice:
        begin_slice(0)
        bias.grad = torch.ones(2)
        found.sums.take([bias], [torch.ones(1)])
        begin_slice(1)
    assert bias.grad.tolist() == [0.0, 0.0]
    assert [one is bias for one in reduction.reduced] == [True]
    found.begin()
    params, parts = found.sums.take([bias], [torch.ones(1)])
    assert parts[0].item() == 1.0  # the sum of the pass before is gone
    assert len(params) == 1


def test_a_pass_that_failed_leaves_nothing_even_if_its_graph_is_kept(reduction: Reduction) -> None:
    from memascend.deepspeed.slices.held import HeldParameters
    from memascend.deepspeed.slices.weights import PassGradients

    found = PassGradients(reduction, HeldParameters(), by_slice=True)
    found.begin()
    bias: Any = reduction.module.other.bias
    assert found.sums is not None
    kept = [found.weights_of([bias]) for _ in range(2)]

    def fail() -> None:
        with kept[1].in_backward(2) as begin_slice:
            begin_slice(0)
            found.sums.take([bias], [torch.ones(1)])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    found.drop()
    found.begin()
    found.weights_of([bias])
    assert not found.is_late(bias)
    _, parts = found.sums.take([bias], [torch.ones(1)])
    assert parts[0].item() == 1.0


def test_slices_that_use_weights_of_other_modules_are_not_kept(
    reduction: Reduction, gradients: Any
) -> None:
    weights = gradients.weights_of([reduction.module.other.bias])
    with pytest.raises(CannotCut, match=r"weights of other modules \(Linear\)"):  # noqa: SIM117
        with weights.in_forward():
            weights._held.others().add("Linear")
    with weights.in_forward():
        pass


def test_a_weight_that_was_frozen_when_training_began_is_left_to_the_script(
    reduction: Reduction, gradients: Any
) -> None:
    bias: Any = reduction.module.one.bias
    bias.requires_grad_(True)
    bias.grad = torch.ones(2)
    with gradients.weights_of([bias]).in_backward(1) as begin_slice:
        begin_slice(0)
    assert reduction.reduced == []
    assert not hasattr(bias, "ds_grad_is_ready")


def test_shared_weights_are_widened_before_a_module_outside_of_slices_uses_them(
    reduction: Reduction, gradients: Any
) -> None:
    """Autograd adds to a gradient in the dtype of the first one."""
    assert reduction.module.one.weight.is_widened


def test_a_module_in_two_places_may_be_used_in_slices_and_whole() -> None:
    from memascend.deepspeed.slices.weights import _shared_parameters

    model = Model()
    assert [one is model.one.weight for one in _shared_parameters(model)] == [True]
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2), model.other)
    model.layer = model.alias = layer
    found = _shared_parameters(model)
    assert {id(one) for one in found} == {id(model.one.weight), id(model.other.bias)}
