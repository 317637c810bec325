"""A trace that lacks a parameter of a module is made anew, exactly where DeepSpeed would raise."""

from __future__ import annotations

from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("deepspeed")

from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

from memascend.deepspeed.parameters.module_trace import drop_stale_trace


class Coordinator:
    """DeepSpeed's, as far as its trace goes."""

    def __init__(self, queue: str, *, fetched: str = "", is_complete: bool = True) -> None:
        self._PartitionedParameterCoordinator__step_id = 3
        last = defaultdict(lambda: -1, dict.fromkeys(fetched, 4))
        self._PartitionedParameterCoordinator__most_recent_step_id_param_fetched_for = last
        traced = deque(SimpleNamespace(param=name) for name in queue)
        self._PartitionedParameterCoordinator__param_queue = traced
        self.is_complete = is_complete
        self.invalidated = 0

    def is_complete_trace(self) -> bool:
        return self.is_complete

    def _invalidate_trace(self) -> None:
        self.invalidated += 1


@pytest.mark.parametrize(
    ("params", "queue", "fetched", "is_stale"),
    [
        ("ab", "abc", "", False),
        ("ba", "abc", "", False),
        ("ab", "aabc", "", False),  # used twice before
        ("abx", "abc", "", True),  # touched outside its module since
        ("abx", "abc", "x", False),  # fetched ahead, for a later module
        ("ab", "ab", "ab", False),
        ("x", "", "", True),
        ("", "abc", "", False),
    ],
)
def test_it_is_stale_where_the_next_parameters_are_not_the_modules(
    params: str, queue: str, fetched: str, is_stale: bool
) -> None:
    coordinator: Any = Coordinator(queue, fetched=fetched)
    drop_stale_trace(coordinator, params)
    assert coordinator.invalidated == is_stale
    assert len(coordinator._PartitionedParameterCoordinator__param_queue) == len(queue)


def test_without_a_trace_there_is_nothing_to_forget() -> None:
    coordinator: Any = Coordinator("abc", is_complete=False)
    drop_stale_trace(coordinator, "x")
    assert not coordinator.invalidated


def test_deepspeed_has_what_is_looked_at() -> None:
    made = PartitionedParameterCoordinator(
        prefetch_bucket_sz=0,
        max_reuse_distance_in_numel=0,
        max_available_parameters_in_numel=0,
        allgather_stream=None,
        inflight_param_registry={},
    )
    assert vars(Coordinator("")).keys() - vars(made).keys() <= {"is_complete", "invalidated"}
    assert callable(made._invalidate_trace)
    assert not made.is_complete_trace()
