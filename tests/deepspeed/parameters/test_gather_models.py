"""Lists of parameters of several models, which DeepSpeed gives to the first one's swapper."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from memascend.deepspeed.parameters import gather as gather_module
from memascend.deepspeed.parameters.gather import (
    by_swapper,
    wrap_all_gather,
    wrap_coordinated,
    wrap_fetch,
    wrap_partition,
)
from tests.support.gathered_lists import TwoAtATime, parameters


class Stock:
    """DeepSpeed's own swapper, as far as it is asked here."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def note(self, what: str, params: Any) -> None:
        self.calls.append(("stock " + what, [param.ds_id for param in params]))


def of_several_models() -> tuple[list[Any], list[Any]]:
    """Parameters of two models of ours, of a stock one, and of one in host memory; their calls."""
    first, second = TwoAtATime(), TwoAtATime()
    calls = first.calls = second.calls = []
    stock = Stock(calls)
    params = []
    for ds_id, swapper in enumerate((stock, first, second, first, None, second)):
        (param,) = parameters(swapper or stock, 1, ds_id)
        param.nvme_swapper = swapper
        params.append(param)
    return params, calls


def test_a_list_is_split_by_swapper_in_an_order_that_no_set_changes() -> None:
    params, _ = of_several_models()
    for order in (params, params[::-1]):
        parts = [[param.ds_id for param in part] for _, part in by_swapper(order)]
        assert parts == [[0], [1, 3], [2, 5], [4]]
    assert [swapper for swapper, _ in by_swapper(params)] == [
        None,
        params[1].nvme_swapper,
        params[2].nvme_swapper,
        None,
    ]


@pytest.mark.parametrize(
    ("stream", "gathered"),
    [("a stream", [[1, 3], [2, 5]]), (None, [[1], [3], [2], [5]])],
    ids=["device", "gloo"],
)
def test_each_swapper_gathers_its_own_parameters_of_a_list(
    stream: str | None, gathered: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather_module, "stream_here", lambda: stream)
    params, calls = of_several_models()
    params.pop(4)
    assert params[0].all_gather(param_list=params[::-1]) is None
    assert calls[0] == ("stock gather", [0])
    assert [ids for what, ids in calls if what == "gather"] == gathered
    assert [ids for what, ids in calls if what == "let go"] == [[1, 3], [2, 5]]


def test_what_fails_for_one_model_is_given_up_for_all() -> None:
    params, calls = of_several_models()

    def fail(init: Any, param_list: Any, **_: Any) -> list[str]:
        if param_list[0].ds_id == 2:
            raise torch.OutOfMemoryError("no memory left")
        return []

    with pytest.raises(torch.OutOfMemoryError):
        wrap_all_gather(fail)(None, params)
    assert calls[-2:] == [("give up", [1, 3]), ("give up", [2, 5])]


def test_the_coordinator_gathers_a_list_for_each_swapper() -> None:
    params, _ = of_several_models()
    seen: list[Any] = []

    def original(coordinator: Any, part: Any, forward: bool) -> None:
        seen.append((coordinator, [param.ds_id for param in part], forward))

    wrap_coordinated(original)("coordinator", set(map(Hashable, params)), True)
    assert seen == [("coordinator", ids, True) for ids in ([0], [1, 3], [2, 5], [4])]


class Hashable:
    """A parameter in a set."""

    def __init__(self, param: Any) -> None:
        self.ds_id, self.nvme_swapper = param.ds_id, param.nvme_swapper


@pytest.mark.parametrize("awaited", [1, 2])
def test_ranks_begin_what_a_module_has_of_two_models_in_one_order(awaited: int) -> None:
    """Which parameter is waited for first differs between ranks."""
    swappers = [TwoAtATime(begins_late=True), TwoAtATime(begins_late=True)]
    calls = swappers[0].calls = swappers[1].calls = []
    params = [parameters(swapper, 1, ds_id)[0] for ds_id, swapper in enumerate(swappers, start=1)]
    handles = {param.ds_id: param.all_gather_coalesced([param]).of(param) for param in params}
    module = SimpleNamespace(
        named_parameters=lambda recurse: [(str(param.ds_id), param) for param in params],
        ds_external_parameters=lambda: [],
    )

    def original(*_: Any) -> None:
        handle = handles[awaited]
        handle._gathers.start_awaited(handle.param)

    traceless = SimpleNamespace(is_complete_trace=lambda: False)
    wrap_fetch(original)(traceless, module, True, False)
    assert [ids for what, ids in calls if what == "gather"] == [[1], [2]]


@pytest.mark.parametrize("mine", ["ours", "stock", "memory"])
def test_a_parameter_is_partitioned_in_its_own_context(mine: str) -> None:
    """DeepSpeed gives a list to the context of its first parameter."""
    ours = TwoAtATime()
    context = {"ours": ours, "stock": Stock([]), "memory": None}
    seen: list[Any] = []
    for name, swapper in context.items():
        (param,) = parameters(ours, 1)
        param.ds_status, param.nvme_swapper = ZeroParamStatus.AVAILABLE, swapper
        param.partition = lambda **given: seen.append(given)
        here: list[Any] = []
        init = SimpleNamespace(param_swapper=context[mine])
        wrap_partition(lambda *given, **_: here.append(given))(init, param, has_been_updated=True)  # noqa: B023
        crosses = name != mine and "ours" in (name, mine)
        assert bool(here) is not crosses
        assert seen == ([{"has_been_updated": True, "free_data": True}] if crosses else [])
        seen.clear()
