"""Gathers in turns, and what passes through to the stock functions untouched."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from memascend.deepspeed.parameters import gather as gather_module
from memascend.deepspeed.parameters.gather import (
    swapper_of,
    wrap_all_gather,
    wrap_convert,
    wrap_partition,
)
from memascend.errors import ConfigError
from tests.support.gathered_lists import TwoAtATime, parameters


@pytest.fixture
def swapper() -> TwoAtATime:
    return TwoAtATime()


TURNS_OF_THREE = [
    ("read", [0, 1]),
    ("copy", [0, 1]),
    ("gather", [0, 1]),
    ("let go", [0, 1]),
    ("read", [2]),
    ("copy", [2]),
    ("gather", [2]),
    ("let go", [2]),
]


def test_a_list_is_read_gathered_and_let_go_turn_by_turn(swapper: TwoAtATime) -> None:
    params = parameters(swapper, 3)
    handle = params[0].all_gather_coalesced(reversed(params), quantize=False)
    assert swapper.calls == TURNS_OF_THREE
    assert swapper.waits == 2  # for the device to catch up, before each turn
    assert swapper.updated == [[0, 1], [2]]  # for the optimizer, behind its caller
    assert [one.keywords for one in handle.handles] == [{"quantize": False}] * 2


def test_one_turn_has_the_handle_of_its_gather(swapper: TwoAtATime) -> None:
    params = parameters(swapper, 2)
    [handle] = params[0].all_gather_coalesced(params).handles
    assert handle.params == params


def test_every_turn_is_waited_for_with_the_keywords_of_its_handle(swapper: TwoAtATime) -> None:
    """Those of DeepSpeed take keywords alone; before 0.19.3 its own list gave them positions."""
    params = parameters(swapper, 3)
    gathered = params[0].all_gather_coalesced(params)
    gathered.handles = [Handle(), Handle()]
    for _ in params:
        gathered.wait(handle_dependency=False)
    assert [one.waits for one in gathered.handles] == [[{"handle_dependency": False}]] * 2


def test_shards_in_device_memory_live_until_their_gather_was_waited_for(
    swapper: TwoAtATime,
) -> None:
    params = parameters(swapper, 2)
    for param in params:
        param.ds_tensor.device, param.ds_tensor.data = torch.device("meta"), torch.empty(4)
    alive = [weakref.ref(param.ds_tensor.data) for param in params]
    handle = params[0].all_gather_coalesced(params)
    for param in params:
        param.ds_tensor.data = None  # as the swapper lets it go
    assert all(one() is not None for one in alive)
    handle.handles = [Handle()]
    handle.wait(handle_dependency=False)
    assert all(one() is None for one in alive)


def test_an_empty_list_is_gathered_without_deepspeed_which_could_not_before_0_19_7(
    swapper: TwoAtATime,
) -> None:
    (param,) = parameters(swapper, 1)
    param.all_gather_coalesced([]).wait()
    assert swapper.calls == []


def test_the_blocking_gather_skips_what_is_there_and_takes_each_once(swapper: TwoAtATime) -> None:
    params = parameters(swapper, 4)
    params[3].ds_status = ZeroParamStatus.AVAILABLE
    handles = params[0].all_gather(param_list=[*params, *params], async_op=True)
    assert swapper.calls == [call for call in TURNS_OF_THREE if call[0] != "copy"]
    assert handles == ["handle of 2", "handle of 1"]
    swapper.calls.clear()
    assert params[1].all_gather() is None
    assert ("copy", [1]) in swapper.calls
    assert swapper.calls[-1] == ("let go", [1])


def test_a_rank_that_is_alone_gathers_without_a_collective() -> None:
    """Upstream sends one parameter to itself, and gloo takes neither float8 nor int16."""
    (param,) = parameters(TwoAtATime(is_alone=True), 1)
    param.ds_shape, param.ds_tensor.data = (2, 4), torch.ones(8)
    assert param.all_gather() is None
    assert param.nvme_swapper.calls == [(what, [0]) for what in ("read", "copy", "let go")]
    assert param.ds_status is ZeroParamStatus.AVAILABLE
    assert torch.equal(param.data, torch.ones(2, 4))
    param.ds_status = ZeroParamStatus.NOT_AVAILABLE
    (handle,) = param.all_gather(async_op=True)
    assert param.ds_status is ZeroParamStatus.INFLIGHT
    handle.wait()
    assert param.ds_status is ZeroParamStatus.AVAILABLE


@pytest.mark.parametrize(
    ("dtype", "numel", "is_refused"),
    [(torch.uint8, 64, True), (torch.uint8, 62, False), (torch.bfloat16, 64, False)],
)
def test_stocks_swapper_gets_no_dtype_but_the_models(
    dtype: torch.dtype, numel: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It casts what it stores: whole numbers above 256 would change in bf16.

    A parameter says how many ranks share it since 0.19.3 alone; which they are it always says.
    """
    monkeypatch.setattr(gather_module.dist, "get_world_size", lambda group: len(group))
    stock = SimpleNamespace(
        memascend_attachment=None, dtype=torch.bfloat16, swappable_tensor=lambda numel: numel >= 32
    )
    param = SimpleNamespace(
        dtype=dtype, ds_numel=numel, ds_process_group=("ranks", "of two"), nvme_swapper=stock
    )
    wrapped = wrap_convert(lambda init, param: None)
    if not is_refused:
        wrapped(None, param)
        return
    told = "buffer_pool is off.*bfloat16.*64 elements is torch.uint8.*Turn buffer_pool on"
    with pytest.raises(ConfigError, match=told):
        wrapped(None, param)


def test_parameters_of_a_stock_swapper_keep_their_functions() -> None:
    stock = SimpleNamespace(note=lambda *_: None)
    (param,) = parameters(stock, 1)
    assert swapper_of(param) is None
    assert param.all_gather([param], async_op=True) == ["handle of 1"]
    assert param.all_gather_coalesced([param]).params == [param]


# -- a gather that fails ---------------------------------------------------------------------------


class Handle:
    """Of a gather in flight; an error is raised when it is waited for."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.waits: list[Any] = []

    def wait(self, **keywords: Any) -> None:
        self.waits.append(keywords)
        if self.error is not None:
            raise self.error


def failing(
    params: list[Any],
    which: str,
    *,
    turn: int,
    handles: list[Handle],
    waiting: BaseException | None = None,
) -> None:
    """Has a turn's gather fail as where the device has no memory left, and the waits for others."""

    def gather(*_: Any, **__: Any) -> Any:
        if len(handles) == turn:
            raise torch.OutOfMemoryError("no memory left")
        handles.append(Handle(waiting))
        return handles[-1] if which == "all_gather_coalesced" else [handles[-1]]

    for param in params:
        if which == "all_gather":
            param.all_gather = wrap_all_gather(gather)
        else:
            param.all_gather_coalesced = gather
            wrap_convert(lambda *_: None)(None, param)


@pytest.mark.parametrize("which", ["all_gather", "all_gather_coalesced"])
def test_out_of_memory_in_a_turn_gives_up_what_was_begun(
    swapper: TwoAtATime, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        gather_module, "stream_here", lambda: "a stream"
    )  # lists are gathered at once
    params = parameters(swapper, 5)
    params[4].ds_status = ZeroParamStatus.INFLIGHT  # another gather's
    for param in params:
        param.all_gather = param.all_gather_coalesced = None
    handles: list[Handle] = []
    failing(params, which, turn=1, handles=handles)
    arguments = (None, params) if which == "all_gather" else (params,)
    with pytest.raises(torch.OutOfMemoryError):
        getattr(params[0], which)(*arguments)
    assert [handle.waits for handle in handles] == [[{}]]
    assert swapper.calls == [
        ("read", [0, 1]),
        ("copy", [0, 1]),
        ("let go", [0, 1]),
        ("read", [2, 3]),
        ("copy", [2, 3]),
        ("give up", [0, 1, 2, 3]),
    ]


def test_ctrl_c_in_the_wait_for_what_a_failed_gather_has_begun_gives_it_up_too(
    swapper: TwoAtATime,
) -> None:
    params = parameters(swapper, 3)
    which = "all_gather_coalesced"
    failing(params, which, turn=1, handles=[], waiting=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        params[0].all_gather_coalesced(params)
    assert swapper.calls[-1] == ("give up", [0, 1, 2])


def test_out_of_memory_where_a_gather_is_waited_for_gives_all_of_it_up(
    swapper: TwoAtATime,
) -> None:
    params = parameters(swapper, 2)
    handle = params[0].all_gather_coalesced(params)
    handle.handles = [Handle(torch.OutOfMemoryError("no memory left"))]
    with pytest.raises(torch.OutOfMemoryError):
        handle.wait(handle_dependency=True)
    assert swapper.calls[-1] == ("give up", [0, 1])
    handle.wait()  # of the other parameter, when DeepSpeed begins anew
    assert handle.handles[0].waits == [{"handle_dependency": True}]


# -- partitioning ----------------------------------------------------------------------------------


def partition(param: Any, **keywords: Any) -> bool:
    """Whether the stock function was called, with what it is to get."""
    seen: list[Any] = []

    def original(init: Any, one: Any, buffer: Any, **given: Any) -> None:
        seen.append((one, buffer, given))

    init = SimpleNamespace(param_swapper=param.nvme_swapper)
    wrap_partition(original)(init, param, **keywords)
    return seen == [(param, None, {"has_been_updated": False, "free_data": True} | keywords)]


def test_a_modified_parameter_gets_a_slot_first(swapper: TwoAtATime) -> None:
    (param,) = parameters(swapper, 1)
    param.ds_status = ZeroParamStatus.AVAILABLE
    assert partition(param, has_been_updated=False)
    assert swapper.calls == []
    assert partition(param, has_been_updated=True)
    assert swapper.calls == [("stage", [0])]


@pytest.mark.parametrize(
    ("location", "status"),
    [("none", ZeroParamStatus.AVAILABLE), ("nvme", ZeroParamStatus.NOT_AVAILABLE)],
)
def test_one_in_memory_or_not_gathered_needs_none(
    swapper: TwoAtATime, location: str, status: ZeroParamStatus
) -> None:
    (param,) = parameters(swapper, 1)
    param.ds_tensor.final_location, param.ds_status = location, status
    assert partition(param, has_been_updated=True)
    assert swapper.calls == []


def test_what_partitioning_lets_go_of_is_counted(swapper: TwoAtATime) -> None:
    (param,) = parameters(swapper, 1)

    def free(init: Any, one: Any, buffer: Any, has_been_updated: bool, free_data: bool) -> None:
        if free_data:
            one.data = torch.zeros(0)

    init = SimpleNamespace(param_swapper=swapper)
    wrap_partition(free)(init, param, free_data=False)
    assert swapper.released == []
    wrap_partition(free)(init, param)
    wrap_partition(free)(init, param)  # is partitioned already
    assert swapper.released == [8 * 4]


def test_the_first_partitioning_takes_host_memory_of_ours(swapper: TwoAtATime) -> None:
    (param,) = parameters(swapper, 1)
    param.ds_tensor = None
    assert partition(param)
    assert swapper.components == ["small parameters"]


def test_partitioning_under_a_stock_swapper_passes_through() -> None:
    assert partition(SimpleNamespace(nvme_swapper=torch.nn.Identity()), has_been_updated=True)
