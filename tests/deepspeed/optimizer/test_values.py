"""Single values: parts of whole sub-groups, and the values that a script sets on its own rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from memascend.deepspeed.optimizer.upstream import Upstream
from memascend.deepspeed.optimizer.values import (
    TiledValues,
    WholeValues,
    set_local_gradient,
    set_local_state,
)
from memascend.errors import TornStepError
from memascend.streaming.background import BackgroundStep
from memascend.streaming.optimizer.step import Step
from tests.support.runtimes import stand_in


class Stage3(SimpleNamespace):
    """DeepSpeed's optimizer: one sub-group on the drive, and one too small for a drive."""

    def __init__(self, part: torch.Tensor, number: int) -> None:
        self.calls: list[Any] = []
        note = self.calls.append
        super().__init__(
            offload_optimizer=True,
            norm_for_param_grads={},
            get_param_id=lambda param: 0,
            _constant_buffered_norm2=lambda value: value.double().norm(),
            _swappable_optimizer_subgroup=lambda number: number == 0,
            _get_fp32_grad_state_partition=lambda *given: note(("grad", *given)) or (part, number),
            _get_fp32_opt_state_partition=lambda *given: note(("opt", *given)) or (part, number),
            _writeback_swap_state=lambda group, **what: note((group, what)),
            _optimizer_states_and_gradient_swap_out=lambda group: note(("swap out", group)),
        )


def param(*, requires_grad: bool = True) -> Any:
    return SimpleNamespace(
        requires_grad=requires_grad, partition_numel=lambda: 6, ds_shape=torch.Size((3, 4))
    )


@pytest.mark.parametrize("number", [0, 1])
def test_a_part_that_is_set_is_stored_where_its_sub_group_is_on_the_drive(number: int) -> None:
    part = torch.zeros(6)
    stage3 = Stage3(part, number)
    gradient, wanted = torch.full((3, 2), 2.0), param()
    set_local_gradient(Upstream(stage3), gradient, wanted)
    assert part.tolist() == [2.0] * 6
    assert stage3.norm_for_param_grads[0].item() == pytest.approx(24.0**0.5)
    set_local_state(Upstream(stage3), torch.full((6,), 3.0), wanted, "exp_avg")
    assert part.tolist() == [3.0] * 6
    stored = [(0, {"write_opt_state": False, "write_gradients": True}), ("swap out", 0)]
    assert stage3.calls == [
        ("grad", wanted, False),
        *(stored[:1] if number == 0 else []),
        ("opt", wanted, False, "exp_avg"),
        *(stored[1:] if number == 0 else []),
    ]


@pytest.mark.parametrize("kind", ["gradient", "state"])
def test_a_value_of_another_length_is_refused_and_a_frozen_parameter_passed_by(kind: str) -> None:
    upstream = Upstream(Stage3(torch.zeros(6), 0))

    def set_local(value: torch.Tensor, wanted: Any) -> None:
        if kind == "gradient":
            set_local_gradient(upstream, value, wanted)
        else:
            set_local_state(upstream, value, wanted, None)

    with pytest.raises(ValueError, match=r"shape \(3, 4\).* 6 elements .* 12.*safe_set_full_"):
        set_local(torch.zeros(12), param())
    set_local(torch.zeros(12), param(requires_grad=False))


@pytest.mark.parametrize(
    ("number", "is_released", "is_copy"),
    [(0, True, True), (0, False, False), (1, True, False)],
)
@pytest.mark.parametrize("kind", ["gradient", "state"])
def test_a_part_of_a_buffer_that_is_free_again_is_copied(
    kind: str, number: int, is_released: bool, is_copy: bool
) -> None:
    part = torch.arange(4.0)
    attachment: Any = SimpleNamespace(runtime=stand_in())
    steps = SimpleNamespace(current=Step())
    values = WholeValues(Upstream(Stage3(part, number)), lambda: attachment, steps)
    given: list[Any] = []

    def original(*arguments: Any) -> tuple[torch.Tensor, int]:
        given.append(arguments)
        return part, number

    if kind == "gradient":
        found, index = values.gradient("param", is_released, original)
        assert given == [("param", is_released)]
    else:
        found, index = values.state("param", is_released, "exp_avg", original)
        assert given == [("param", is_released, "exp_avg")]
    assert (found.tolist(), index) == (part.tolist(), number)
    assert (found is not part) == is_copy


@pytest.mark.parametrize("kind", [WholeValues, TiledValues])
def test_values_of_a_torn_step_are_refused_until_a_load_has_replaced_them(kind: Any) -> None:
    steps = SimpleNamespace(current=Step(), finish=lambda: None)
    runtime = stand_in(background=BackgroundStep())
    stage3 = Stage3(torch.zeros(2), 0)
    stage3.grad_position = {0: (0, 0, 2)}
    stage3.fp32_partitioned_groups_flat = [SimpleNamespace(ds_id="0_0")]
    values = kind(Upstream(stage3), lambda: SimpleNamespace(runtime=runtime), steps)
    values.check()
    steps.current.note_load()
    for read in (values.check, lambda: values.state(param(), True, None, stage3.calls.append)):
        with pytest.raises(TornStepError, match=r"half-way.*load a checkpoint with its optimizer"):
            read()
    assert stage3.calls == []
    steps.current.mend()
    values.check()


def test_a_step_under_way_may_gather_parameters() -> None:
    steps, runtime = SimpleNamespace(current=Step()), stand_in(background=BackgroundStep())
    attachment: Any = SimpleNamespace(runtime=runtime)
    steps.current.note_change()
    WholeValues(Upstream(None), lambda: attachment, steps).check()
    runtime.background.start([lambda reach: None], {}, lambda: None)
    tiled = TiledValues(Upstream(None), lambda: attachment, steps)
    tiled.check()
    runtime.background.finish()
    with pytest.raises(TornStepError):
        tiled.check()
    runtime.background.close()
