"""Each difference between releases, in its newest form and in its older one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from memascend.deepspeed import older_releases

PARAM = SimpleNamespace(ds_id=7)
NONE: dict[str, Any] = {}
SCATTER = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"


def test_the_part_of_a_parameter_is_of_its_own_group_or_of_the_only_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newest = SimpleNamespace(_get_param_partition_rank=lambda param: param.ds_id)
    assert older_releases.partition_rank(newest, PARAM) == 7
    monkeypatch.setattr(older_releases.dist, "get_rank", lambda group: {"all": 3}[group])
    assert older_releases.partition_rank(SimpleNamespace(dp_process_group="all"), PARAM) == 3


def test_a_parameter_knows_its_part_or_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    assert older_releases.rank_of_part(SimpleNamespace(ds_zero_partition_rank=2)) == 2
    monkeypatch.setattr(older_releases.dist, "get_rank", lambda group: {"own": 1}[group])
    assert older_releases.rank_of_part(SimpleNamespace(ds_process_group="own")) == 1


@pytest.mark.parametrize("value", [True, False])
def test_the_end_of_a_window_is_a_method_or_an_attribute(value: bool) -> None:
    for known in (value, lambda: value):
        stage3 = SimpleNamespace(is_gradient_accumulation_boundary=known)
        assert older_releases.is_boundary(stage3) is value


def test_parameters_with_gradients_are_noted_where_they_are_asked_for() -> None:
    newest = SimpleNamespace(_offload_boundary_param_ids=set())
    older_releases.note_reduced(newest, PARAM)
    assert newest._offload_boundary_param_ids == {7}
    older = SimpleNamespace()
    older_releases.note_reduced(older, PARAM)
    assert vars(older) == NONE


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function as DeepSpeed does for profilers, which hides its code."""

    def wrapped(*arguments: Any) -> Any:
        return function(*arguments)

    return wrapped


def test_gradients_arrive_as_reduced_or_rounded_to_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def widens(self: Any, gradients: Any) -> Any:
        return gradients.to(self.gradient_accumulation_dtype)

    def rounds(self: Any, gradients: Any) -> Any:
        return gradients.to(self.dtype)

    stage3 = SimpleNamespace(dtype=torch.bfloat16, get_param_comm_dtype=lambda _: torch.float16)
    for scatter, dtype in ((widens, torch.float16), (rounds, torch.bfloat16)):
        monkeypatch.setattr(DeepSpeedZeroOptimizer_Stage3, SCATTER, decorated(scatter))
        assert older_releases.arriving_dtype(stage3, PARAM) == dtype


def test_the_newest_release_widens_what_it_reduces() -> None:
    scatter = getattr(DeepSpeedZeroOptimizer_Stage3, SCATTER)
    assert older_releases._reads(scatter, "gradient_accumulation_dtype")


def test_muon_is_off_where_stage_3_has_none() -> None:
    assert older_releases.uses_muon(SimpleNamespace(use_muon=True))
    assert not older_releases.uses_muon(SimpleNamespace())


class Old:
    """DeepSpeed 0.18.4's optimizer, with the hook that ours adds."""

    def __init__(self) -> None:
        self.micro_step_id = 3
        self._backward_active_depth = 2
        self._remaining_grad_acc_hooks = 5
        self.begun = 0

    def clear_backward_seen_flag(self) -> None:
        self.begun += 1


class New(Old):
    """Later ones call the hook by themselves, and count micro-steps there."""

    def __init__(self) -> None:
        super().__init__()
        self._epilogue_ran_this_backward = True


def test_a_forward_pass_begins_with_one_call_in_every_release() -> None:
    for stage3, calls in ((Old(), 1), (New(), 0)):
        older_releases.begin_forward(stage3)
        assert stage3.begun == calls
    older_releases.begin_forward(SimpleNamespace())  # an engine without an optimizer


def test_a_reduction_inside_a_micro_step_does_not_end_it() -> None:
    old, new = Old(), New()
    older_releases.continue_micro_step(old)
    older_releases.continue_micro_step(new)
    assert old.micro_step_id == 2  # the reduction has counted it
    assert new.micro_step_id == 3
    assert not new._epilogue_ran_this_backward


def test_after_an_aborted_pass_the_next_counts_from_its_own_beginning() -> None:
    for stage3, hooks in ((Old(), 0), (New(), 5)):
        older_releases.end_backward_graphs(stage3)
        assert stage3._backward_active_depth == 0
        assert stage3._remaining_grad_acc_hooks == hooks


def test_a_bucket_is_cleared_and_keeps_its_buffer() -> None:
    old = SimpleNamespace(params=[1, 2], elements=8, buffer="kept", clear=None)
    older_releases.clear_bucket(old)
    assert vars(old) == {"params": [], "elements": 0, "buffer": "kept", "clear": None}
    cleared: list[str] = []
    older_releases.clear_bucket(SimpleNamespace(clear_params=lambda: cleared.append("params")))
    assert cleared == ["params"]


def test_norms_are_in_fp64_where_deepspeed_does_not_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(older_releases, "utils", SimpleNamespace())
    assert older_releases.norm_dtype() == torch.float64
    chosen = SimpleNamespace(get_norm_dtype=lambda: torch.float32)
    monkeypatch.setattr(older_releases, "utils", chosen)
    assert older_releases.norm_dtype() == torch.float32


@pytest.mark.parametrize(
    ("engine", "rank"),
    [
        ({"checkpoint_mp_rank": 4}, 4),
        ({"mpu": None}, 0),
        ({"mpu": SimpleNamespace(get_model_parallel_rank=lambda: 2)}, 2),
    ],
)
def test_the_model_parallel_rank_is_the_engines_or_its_units(
    engine: dict[str, Any], rank: int
) -> None:
    assert older_releases.model_parallel_rank(SimpleNamespace(**engine)) == rank
