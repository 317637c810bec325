"""DeepSpeed's optimizer object by our names: what is changed for a time is put back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from memascend.deepspeed.optimizer.upstream import Upstream

Change = Callable[[Upstream], AbstractContextManager[None]]
VERDICT = torch.zeros(1)


@pytest.mark.parametrize(
    ("change", "name", "before", "within"),
    [
        (lambda it: it.gathering_nothing(), "persistent_parameters", ["norm"], []),
        (lambda it: it.adding(), "micro_step_id", 0, 1),
        (lambda it: it.adding(), "micro_step_id", 3, 3),
        (lambda it: it.flat_gradients_as(VERDICT), "grad_partitions_flat_buffer", None, VERDICT),
        (lambda it: it.pinning_gradients(False), "offload_optimizer_pin_memory", True, False),
        (lambda it: it.pinning_gradients(True), "offload_optimizer_pin_memory", False, False),
    ],
)
def test_what_is_changed_for_a_time_is_put_back(
    change: Change, name: str, before: Any, within: Any
) -> None:
    stage3 = SimpleNamespace(**{name: before})
    with change(Upstream(stage3)):
        assert getattr(stage3, name) == within
    assert getattr(stage3, name) is before


def test_the_coming_scale_is_that_of_the_next_step_and_nothing_has_grown() -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    class Noting(DynamicLossScaler):  # type: ignore[misc]
        """One that changes an object of its own."""

        def update_scale(self, overflow: bool) -> None:
            self.noted.append(self.cur_iter)
            super().update_scale(overflow)

    scaler = Noting(
        init_scale=4.0,
        scale_window=1,
        min_scale=1.0,
        delayed_shift=1,
        consecutive_hysteresis=True,
        dtype=torch.float16,
    )
    scaler.cur_iter = 1  # the window of one step is over
    scaler.noted = []
    stage3 = SimpleNamespace(loss_scaler=scaler, custom_loss_scaler=False, loss_scale=4.0)
    assert Upstream(stage3).coming_loss_scale() == 8.0
    assert (scaler.cur_scale, scaler.noted) == (4.0, [])
    stage3.custom_loss_scaler = True
    assert Upstream(stage3).coming_loss_scale() == 4.0


def test_only_parameters_that_got_a_gradient_are_reduced() -> None:
    params = [SimpleNamespace(ds_id=number) for number in range(3)]
    stage3 = SimpleNamespace(
        fp16_groups=[params[:2], params[2:]], _offload_boundary_param_ids=set()
    )
    upstream = Upstream(stage3)
    for param in (params[2], params[0]):
        upstream.note_reduced(param)
    assert upstream.reduced_params() == [params[0], params[2]]


def test_fast_init_is_turned_off_and_was_on_once() -> None:
    stage3 = SimpleNamespace(offload_optimizer_fast_init=True)
    assert [Upstream(stage3).skip_fast_init() for _ in range(2)] == [True, False]


def test_buffers_of_a_gathered_matrix_are_not_kept() -> None:
    """DeepSpeed keeps up to 256 MiB of them on the device until the engine is destroyed."""
    kept: list[torch.Tensor] = []

    def gather(params: Any, *lists: Any) -> list[list[torch.Tensor]]:
        kept.append(torch.empty(4))
        gradients, dtype, momenta = lists
        return [[one.to(dtype) for one in some] for some in (gradients, momenta)]

    stage3 = SimpleNamespace(
        gradient_accumulation_dtype=torch.bfloat16,
        _partitioned_buffers_all_gather=gather,
        _clear_muon_allgather_buffers=kept.clear,
    )
    gradient, momentum = Upstream(stage3).gather_matrix(object(), torch.ones(3), torch.zeros(3))
    assert (gradient.sum(), momentum.sum()) == (3, 0)
    assert kept == []
