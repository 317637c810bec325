"""Steps that every rank takes: nobody goes on when one of them failed, and nobody waits forever."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("deepspeed")

import torch

from memascend.deepspeed.attach import agreement
from memascend.deepspeed.checkpoint.every_rank import on_every_rank, rank_of
from memascend.errors import CheckpointError


@pytest.fixture
def others_fail(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[int]:
    """Another rank that fails or not; gives what this rank reported."""
    reported: list[int] = []

    def all_reduce(failed: torch.Tensor) -> None:
        reported.append(int(failed[0].item()))
        failed[1] = int(request.param)

    monkeypatch.setattr(agreement.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(agreement.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(agreement.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(agreement.dist, "all_reduce", all_reduce)
    return reported


def fail() -> None:
    raise OSError("mine")


@pytest.mark.parametrize("others_fail", [False], indirect=True)
def test_a_result_comes_back_when_no_rank_failed(others_fail: list[int]) -> None:
    assert on_every_rank(lambda: 5) == 5
    assert others_fail == [0]


@pytest.mark.parametrize("others_fail", [False, True], indirect=True)
def test_an_error_is_reported_to_the_others_before_it_is_raised(others_fail: list[int]) -> None:
    with pytest.raises(OSError, match="mine"):
        on_every_rank(fail)
    assert others_fail == [1]


@pytest.mark.parametrize("others_fail", [True], indirect=True)
def test_an_error_of_another_rank_is_raised_here_too(others_fail: list[int]) -> None:
    with pytest.raises(CheckpointError, match=r"another rank \(rank\(s\) 1\)"):
        on_every_rank(lambda: 5)
    assert others_fail == [0]


@pytest.mark.parametrize(("is_local", "number"), [(False, 9), (True, 1)])
def test_a_rank_has_upstreams_number(is_local: bool, number: int) -> None:
    engine = SimpleNamespace(use_node_local_storage=lambda: is_local, local_rank=1, global_rank=9)
    assert rank_of(engine) == number
