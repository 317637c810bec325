"""The limit of a live model: what it comes to, and refusals before anything is made."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from memascend.base.components import OPTIMIZER_SCRATCH, OPTIMIZER_TILES
from memascend.base.sizes import BOUNCE_BYTES, STAGING_SLOT_COUNT
from memascend.base.units import GIB, KIB, MIB
from memascend.config.block import parse_block
from memascend.config.deepspeed import parse_deepspeed
from memascend.deepspeed.attach import attach as activation
from memascend.deepspeed.plan import from_optimizer as planning
from memascend.deepspeed.plan.optimizers import state_dtype
from memascend.errors import ConfigError
from memascend.plan.derive import derive
from memascend.plan.knobs import LimitTooSmallError
from memascend.plan.shapes import ModelShapes, TensorShape
from memascend.streaming.optimizer.tile_memory import TileMemory, TileShape
from tests.support.streaming_fakes import FakeMemory, FakeStore

ON_DRIVE = {"device": "nvme", "nvme_path": "/drive"}
CONFIG: dict[str, Any] = {
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 3, "offload_param": ON_DRIVE, "offload_optimizer": ON_DRIVE},
}
BLOCK = parse_block({})
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MEMASCEND_CONFIG", "MEMASCEND_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(planning.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(planning.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(planning.dist, "get_rank", lambda: 0)


def smallest(config: dict[str, Any]) -> int:
    """The smallest limit that works with any model, as the refusal of a smaller one names it."""
    with pytest.raises(LimitTooSmallError) as caught:
        planning.check_smallest(BLOCK, config, 1)
    return caught.value.minimum_bytes


# -- what the limit comes to ---------------------------------------------------------------------


def test_no_limit_stated_is_none() -> None:
    assert planning.stated_limit(parse_block({})) is None


@pytest.mark.parametrize(("value", "nbytes"), [("2GiB", 2 * GIB), (123456, 123456)])
def test_a_limit_in_bytes_is_per_rank_and_needs_nothing_known(
    value: object, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown() -> int:
        raise AssertionError("not asked for")

    monkeypatch.setattr(planning, "memory_total", unknown)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert planning.stated_limit(parse_block({"host_memory_limit": value})) == nbytes


@pytest.mark.parametrize(("ranks", "nbytes"), [(1, 4 * GIB), (4, 1 * GIB)])
def test_a_fraction_is_one_of_each_ranks_share(
    ranks: int, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "memory_total", lambda: 8 * GIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert planning.stated_limit(parse_block({"host_memory_limit": 0.5})) == nbytes


def test_all_ranks_take_the_smallest_of_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    def least(tensor: torch.Tensor, op: object) -> None:
        assert op == planning.dist.ReduceOp.MIN
        tensor.clamp_(max=3 * GIB)

    monkeypatch.setattr(planning.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(planning.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(planning.dist, "all_reduce", least)
    monkeypatch.setattr(planning, "memory_total", lambda: 8 * GIB)
    assert planning.stated_limit(parse_block({"host_memory_limit": 0.5})) == 3 * GIB


# -- while the model is built --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit_bytes", "parameters", "slot"),
    [
        (1 * MIB, 4 * MIB, 256 * KIB),
        (64 * MIB, 16 * MIB, 2 * MIB),
        (1 * GIB, 256 * MIB, 8 * MIB),
        (100 * GIB, 512 * MIB, 8 * MIB),
    ],
)
def test_shares_of_the_limit_serve_while_the_model_is_built(
    limit_bytes: int, parameters: int, slot: int
) -> None:
    sizes = planning.building_sizes(limit_bytes)
    assert sizes == {"parameter_budget_bytes": parameters, "staging_slot_bytes": slot}


def test_without_a_limit_they_are_shares_of_half_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planning, "memory_available", lambda: 512 * MIB)
    assert planning.building_sizes(None) == planning.building_sizes(256 * MIB)


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}])
@pytest.mark.parametrize("extra_bytes", [0, 1 * MIB, 1 * GIB])
def test_building_fits_within_every_limit_that_is_let_through(
    precision: dict[str, Any], extra_bytes: int
) -> None:
    limit_bytes = smallest(CONFIG | precision) + extra_bytes
    sizes = planning.building_sizes(limit_bytes)
    staging_bytes = STAGING_SLOT_COUNT * sizes["staging_slot_bytes"]
    assert BOUNCE_BYTES + staging_bytes + sizes["parameter_budget_bytes"] <= limit_bytes
    assert all(nbytes % 4096 == 0 for nbytes in sizes.values())


# -- refusals ------------------------------------------------------------------------------------


def test_the_smallest_limit_passes_and_one_byte_less_does_not() -> None:
    minimum_bytes = smallest(CONFIG)
    planning.check_smallest(BLOCK, CONFIG, minimum_bytes)
    with pytest.raises(LimitTooSmallError) as caught:
        planning.check_smallest(BLOCK, CONFIG, minimum_bytes - 1)
    assert caught.value.minimum_bytes == minimum_bytes
    assert sum(caught.value.needed.values()) == minimum_bytes
    for part in (str(minimum_bytes - 1), f"set the limit to {minimum_bytes} bytes or more"):
        assert part in str(caught.value)


def test_without_a_limit_nothing_is_refused() -> None:
    planning.check_smallest(BLOCK, CONFIG, None)


def test_whole_sub_groups_are_left_to_the_plan_of_the_real_model() -> None:
    """What such an optimizer needs follows from the model's sub-groups, which are not known yet."""
    planning.check_smallest(BLOCK, CONFIG | {"optimizer": {"type": "Lamb"}}, 1)


class Attach:
    """Attaches with a block to a folder that does not exist, and counts the runtimes made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runtime_count = 0

    def runtime(self, **_: object) -> object:
        self.runtime_count += 1
        raise AssertionError("a runtime was made")

    def __call__(self, block: dict[str, Any], **zero: object) -> None:
        config = copy.deepcopy(CONFIG)
        config["zero_optimization"].update(zero)
        activation.attach(parse_block(block), parse_deepspeed(config), self.folder)


@pytest.fixture
def attach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attach:
    made = Attach(tmp_path / "drive")
    monkeypatch.setattr(activation, "Runtime", made.runtime)
    return made


def refused(attach: Attach, block: dict[str, Any], **zero: object) -> str:
    """The one message, after which there is no folder and no runtime."""
    with pytest.raises(ConfigError) as caught:
        attach(block, **zero)
    assert attach.runtime_count == 0
    assert not attach.folder.exists()
    return str(caught.value)


@pytest.mark.parametrize("value", [-1, -0.5, 0, 1.5, "six", "6 apples", "-6GiB", "50%", [], True])
def test_a_limit_that_is_none_is_refused_before_anything_is_made(
    attach: Attach, value: object
) -> None:
    message = refused(attach, {"host_memory_limit": value})
    assert "memascend.host_memory_limit" in message
    assert repr(value) in message


def test_a_limit_too_small_is_refused_before_anything_is_made(attach: Attach) -> None:
    minimum_bytes = smallest(CONFIG)
    for limit in (1 * MIB, minimum_bytes - 1, "5 MB"):
        message = refused(attach, {"host_memory_limit": limit})
        assert "is too small" in message
        assert f"set the limit to {minimum_bytes} bytes or more" in message
        for component in ("optimizer tiles", "staging slots", "parameter slots", "bounce buffers"):
            assert component in message
    with pytest.raises(AssertionError, match="a runtime was made"):
        attach({"host_memory_limit": minimum_bytes})


def test_a_size_that_was_fixed_is_named_when_it_makes_a_limit_too_small(attach: Attach) -> None:
    block = {
        "host_memory_limit": "64MiB",
        "streaming": {"optimizer": {"tile_bytes": 64 * MIB}},
    }
    assert "memascend.streaming.optimizer.tile_bytes=67108864" in refused(attach, block)


@pytest.mark.parametrize(
    "section",
    [
        *("allocator", "buffer_pool", "direct_nvme"),
        *("streaming.parameters", "streaming.gradients", "streaming.optimizer"),
    ],
)
def test_a_limit_with_a_section_off_is_refused_naming_it(attach: Attach, section: str) -> None:
    block: dict[str, Any] = {"host_memory_limit": "1GiB"}
    parent, _, child = section.rpartition(".")
    off = {child: {"enabled": False}}
    block |= {parent: off} if parent else off
    message = refused(attach, block)
    for part in ("memascend.host_memory_limit='1GiB' cannot be kept", section, "Turn it on"):
        assert part in message


def test_the_overflow_check_may_be_off_under_a_limit(attach: Attach) -> None:
    with pytest.raises(AssertionError, match="a runtime was made"):
        attach({"host_memory_limit": "1GiB", "overflow_check": {"enabled": False}})


@pytest.mark.parametrize("name", ["offload_param", "offload_optimizer"])
def test_a_limit_with_something_on_the_cpu_is_refused_naming_it(attach: Attach, name: str) -> None:
    message = refused(attach, {"host_memory_limit": 1 * GIB}, **{name: {"device": "cpu"}})
    for part in ("cannot be kept", f'zero_optimization.{name}.device is "cpu"', 'it to "nvme"'):
        assert part in message


class AdamW(torch.optim.AdamW):
    """Called as a known one, and may do anything."""


@pytest.mark.parametrize("kind", [torch.optim.AdamW, AdamW])
def test_only_an_optimizer_that_is_known_is_planned_in_tiles(kind: Any) -> None:
    optimizer = SimpleNamespace(
        base=kind([torch.nn.Parameter(torch.ones(3))]),
        stored_dtype=torch.bfloat16,
        reduction_dtype=torch.bfloat16,
        accumulation_dtype=torch.float32,
        master_dtype=torch.float32,
        numels=[5, 7],
        norm_max=1.0,
    )
    request = planning._request(optimizer, BLOCK, CONFIG)
    assert request.is_tiled == (kind is torch.optim.AdamW)
    assert (request.states, request.sub_group_numels) == (2, (5, 7))
    assert request.optimizer.endswith("AdamW")
    assert (request.arriving_dtype, request.gradient_dtype) == ("bf16", "fp32")


@pytest.mark.parametrize(
    ("stored", "master", "sums"),
    [
        *itertools.product((BF16, FP16, FP32), (BF16, FP16, FP32), (BF16, FP16, FP32)),
        (torch.float64, FP32, FP32),
    ],
)
def test_the_plan_has_every_byte_of_the_tiles_whatever_the_dtypes(
    stored: torch.dtype, master: torch.dtype, sums: torch.dtype
) -> None:
    """fp16 and bf16 have one size, and are still cast into each other."""
    base = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))])
    optimizer = SimpleNamespace(
        base=base,
        stored_dtype=stored,
        reduction_dtype=sums,
        accumulation_dtype=sums,
        master_dtype=master,
        numels=[1 << 20],
        norm_max=0.0,
    )
    request = planning._request(optimizer, BLOCK, CONFIG)
    plan = derive(ModelShapes("m", (TensorShape("w", (1 << 20,)),)), request=request)
    memory = FakeMemory()
    shape = TileShape(
        numel=plan.tile_numel,
        count=plan.tile_count,
        state_count=request.states,
        master_dtype=master,
        state_dtype=state_dtype(base, master, "fp32"),
        gradient_dtype=sums,
        parameter_dtype=stored,
    )
    TileMemory(store=FakeStore(), memory=memory, shape=shape)
    taken = Counter[str]()
    for component, nbytes in memory.taken:
        taken[component] += nbytes
    planned = {name: plan.host[name] for name in (OPTIMIZER_TILES, OPTIMIZER_SCRATCH)}
    assert planned == {name: taken[name] for name in planned}


@pytest.mark.parametrize("least", [2, 9])
def test_ranks_plan_for_as_many_drives_as_the_one_that_has_fewest(
    monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    """Else they would cut gathers in other places than those of a machine with more volumes."""
    monkeypatch.setattr(planning.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(planning.dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(planning.dist, "all_reduce", lambda tensor, op: tensor.clamp_(max=least))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    optimizer = SimpleNamespace(
        base=torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))]),
        stored_dtype=BF16,
        reduction_dtype=BF16,
        accumulation_dtype=BF16,
        master_dtype=FP32,
        numels=[5],
        norm_max=0.0,
    )
    block = parse_block({"volumes": [f"/drive{index}" for index in range(6)]})
    request = planning._request(optimizer, block, CONFIG)
    assert (request.volume_count, request.drive_count) == (6, min(least, 3))


def test_a_limit_that_nobody_set_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def derive(_: Any, *, request: Any, limit_bytes: int | None = None) -> Any:
        if limit_bytes is None:
            return SimpleNamespace(host_bytes=4 * GIB)
        raise LimitTooSmallError("too small", limit_bytes=1, minimum_bytes=2, needed={"tiles": 2})

    monkeypatch.setattr(planning, "derive", derive)
    monkeypatch.setattr(planning, "_request", lambda *_: None)
    monkeypatch.setattr(planning, "from_module", lambda _: None)
    monkeypatch.setattr(planning, "memory_available", lambda: 2 * GIB)
    with pytest.raises(LimitTooSmallError, match=r"host_memory_limit is not set.*too small") as it:
        planning.plan_for(None, torch.nn.Linear(1, 1), BLOCK, CONFIG, None)
    assert it.value.minimum_bytes == 2
