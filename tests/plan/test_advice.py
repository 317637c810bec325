"""What more memory is good for: bytes that the plan itself would save, or sizes that it lacks."""

from __future__ import annotations

from typing import Any

import pytest

from memascend.base.units import GIB, MIB, format_nbytes
from memascend.config.block import MicroBatchConfig, parse_block
from memascend.config.deepspeed import DeepSpeedSettings, parse_deepspeed
from memascend.plan.advice import (
    advise,
    advise_in_cpu,
    advise_one_pass,
    advise_pinning,
    advise_wear,
)
from memascend.plan.derive import Plan, PlanRequest, derive
from memascend.plan.knobs import LimitTooSmallError
from memascend.plan.shapes import builtin
from tests.support.plan_models import decoder

REQUEST = PlanRequest()


def moved_bytes(plan: Plan) -> int:
    return sum(plan.read_bytes.values()) + sum(plan.written_bytes.values())


def test_a_gib_more_keeps_a_gib_of_parameters_which_each_pass_reads() -> None:
    shapes = builtin("Llama-3.1-8B")
    plan = derive(shapes, request=PlanRequest(reuse_numel=0))
    saved = advise(shapes, plan)
    # Read by each of two passes and by the step, which writes it.
    assert f"would save {format_nbytes(4 * GIB)} of the" in saved
    assert format_nbytes(moved_bytes(plan)) in saved


def test_with_a_limit_the_gib_comes_on_top_of_it() -> None:
    shapes = builtin("Llama-3.1-8B")
    plan = derive(shapes, request=REQUEST, limit_bytes=8 * GIB)
    assert "(8.00 GiB now)" in advise(shapes, plan)


def test_where_something_had_to_shrink_it_says_from_where_on_nothing_has() -> None:
    shapes = builtin("Llama-3.1-8B")
    default = derive(shapes, request=REQUEST)
    plan = derive(shapes, request=REQUEST, limit_bytes=64 * MIB)
    found = advise(shapes, plan)
    assert f"of {format_nbytes(default.host_bytes)} or more" in found
    assert "it is 64.00 MiB" in found


def test_where_all_of_it_is_in_memory_there_is_nothing_to_gain() -> None:
    plan = derive(decoder(), request=REQUEST, limit_bytes=100 * GIB)
    assert advise(decoder(), plan) == "more host memory would save the drive nothing"


def test_max_in_cpu_is_said_to_take_memory_that_is_better_used_otherwise() -> None:
    shapes = builtin("Llama-3.1-8B")
    plan = derive(shapes, request=PlanRequest(max_in_cpu=10**9))
    lean = derive(shapes, request=REQUEST)
    found = advise_in_cpu(shapes, plan)
    assert f"takes {format_nbytes(2 * 10**9)} of host memory" in found
    assert f"without it {format_nbytes(lean.host_bytes)} instead of" in found
    instead = derive(shapes, request=REQUEST, limit_bytes=plan.host_bytes)
    saved = moved_bytes(plan) - moved_bytes(instead)
    assert (f"would save {format_nbytes(saved)} of the" in found) == (saved > 0)


def test_without_max_in_cpu_there_is_nothing_to_say_of_it() -> None:
    plan = derive(decoder(), request=REQUEST)
    assert advise_in_cpu(decoder(), plan) == ""


@pytest.mark.parametrize(
    ("stated", "section", "batch", "wanted"),
    [
        (None, '{"micro_batches": {"count": 8}}', 0, "8 times its value"),
        (MicroBatchConfig(count=2), '{"micro_batches": {"count": 16}}', 2, "16"),
        (MicroBatchConfig(), '{"micro_batches": {}}', 2, "16"),
        (MicroBatchConfig(count="auto"), '{"micro_batches": {"count": "auto"}}', 2, "16"),
        (MicroBatchConfig(sequences=1), '{"micro_batches": {"sequences": 1}}', 2, "16"),
    ],
)
def test_a_run_that_accumulates_is_told_what_one_pass_saves_and_how(
    stated: MicroBatchConfig | None, section: str, batch: int, wanted: str
) -> None:
    shapes = builtin("Llama-3.1-8B")
    request = PlanRequest(gradient_accumulation_steps=8)
    plan = derive(shapes, request=request, limit_bytes=6 * GIB)
    one_pass = derive(shapes, request=REQUEST, limit_bytes=6 * GIB)
    settings = DeepSpeedSettings(train_micro_batch_size_per_gpu=batch)
    found = advise_one_pass(shapes, plan, settings, stated)
    for part in (
        f"moves {format_nbytes(moved_bytes(plan))} in a step",
        f"would move {format_nbytes(moved_bytes(one_pass))} (61% less)",
        f"train_micro_batch_size_per_gpu to {wanted} and gradient_accumulation_steps to 1",
        f'add "memascend": {section}',
    ):
        assert part in found


def test_a_run_that_does_not_accumulate_is_in_one_pass_already() -> None:
    plan = derive(decoder(), request=REQUEST)
    assert advise_one_pass(decoder(), plan, DeepSpeedSettings()) == ""


def zero_3(param: dict[str, Any], optimizer: dict[str, Any]) -> DeepSpeedSettings:
    offload = {"offload_param": param, "offload_optimizer": optimizer}
    on_drive = {name: {"device": "nvme"} | part for name, part in offload.items()}
    return parse_deepspeed({"zero_optimization": {"stage": 3} | on_drive})


@pytest.mark.parametrize(
    ("param", "optimizer", "idle", "nbytes"),
    [
        ({"buffer_count": 3, "buffer_size": 2e8}, {}, ["param.buffer_count"], 3 * 4 * 10**8),
        ({}, {"buffer_count": 4}, ["optimizer.buffer_count"], 4 * 4 * 10**9),
        ({"buffer_count": 5}, {"buffer_count": 4}, ["param", "optimizer"], 17 * 10**9),
    ],
)
def test_buffers_that_are_not_made_are_said_with_their_bytes(
    param: dict[str, Any], optimizer: dict[str, Any], idle: list[str], nbytes: int
) -> None:
    shapes = builtin("Llama-3.1-8B")
    plan = derive(shapes, request=PlanRequest(world=8))
    found = advise_pinning(shapes, plan, zero_3(param, optimizer), locks_for_nothing=True)
    assert all(f"offload_{name}" in found for name in idle), found
    about = float(found.partition("and size, ")[2].split()[0]) * GIB
    assert about == pytest.approx(nbytes, rel=0.1)
    assert "pin_memory" not in found


def test_memory_that_is_locked_for_nothing_is_said_with_its_bytes() -> None:
    shapes = builtin("Llama-3.1-8B")
    plan = derive(shapes, request=REQUEST)
    stated = zero_3({"pin_memory": True}, {"pin_memory": False})
    found = advise_pinning(shapes, plan, stated, locks_for_nothing=True)
    assert found.startswith("offload_param.pin_memory locks ")
    assert format_nbytes(plan.host_bytes) in found
    assert advise_pinning(shapes, plan, stated) == ""
    assert advise_pinning(shapes, plan, zero_3({}, {}), locks_for_nothing=True) == ""


# -- wear ----------------------------------------------------------------------------------------

NVME = {"stage": 3, "offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "nvme"}}
ADAM = {"zero_optimization": NVME, "optimizer": {"type": "AdamW"}}


def wear_of(
    request: PlanRequest,
    block: dict[str, Any] | None = None,
    ds_config: dict[str, Any] | None = None,
    **more: Any,
) -> str:
    shapes = builtin("Llama-3.1-8B")
    plan = derive(shapes, request=request, limit_bytes=more.pop("limit_bytes", None))
    settings = parse_deepspeed(ADAM | (ds_config or {}))
    return advise_wear(shapes, plan, settings, parse_block(block or {}), **more)


def written_tb(request: PlanRequest) -> float:
    return sum(derive(builtin("Llama-3.1-8B"), request=request).written_bytes.values()) / 1e9


def test_wear_is_told_in_the_unit_of_makers_and_for_all_ranks() -> None:
    expected = written_tb(REQUEST)
    assert f"1000 steps write {expected:.0f} TB to the drives" in wear_of(REQUEST)
    assert f"1000 steps write {4 * expected:.0f} TB to the drives" in wear_of(REQUEST, ranks=4)
    assert f"1000 steps write {80 * expected:,.0f} TB to the drives" in wear_of(REQUEST, ranks=80)


def test_the_stated_endurance_comes_before_that_of_the_drives() -> None:
    share = written_tb(REQUEST) / 600
    assert " that " not in wear_of(REQUEST)
    found = wear_of(REQUEST, left_bytes=600 * 10**12)
    assert f"{share:.2%} of the 600 TB that the drives' own SMART data leaves" in found
    found = wear_of(REQUEST, {"wear": {"endurance": "600TB"}}, left_bytes=1)
    assert f"{share:.2%} of the 600 TB that wear.endurance states" in found


def test_the_setting_that_lowers_writes_most_is_named() -> None:
    early = PlanRequest(during_backward=True)
    less = 1 - written_tb(early) / written_tb(REQUEST)
    clipped, unclipped = {"gradient_clipping": 1.0}, {"gradient_clipping": 0.0}
    found = wear_of(REQUEST, ds_config=unclipped)
    assert f"; {less:.0%} less with streaming.optimizer.during_backward" in found
    # Of a parameter, of what its master weight has besides, and of two states.
    for changes, nbytes in (
        ({}, 2 + 2 + 8),
        ({"wants_split_master": False}, 2 + 4 + 8),
        ({"state_dtype": "bf16"}, 2 + 2 + 4),
    ):
        text = wear_of(PlanRequest(**changes), ds_config=unclipped)
        assert f"during_backward: true, for {nbytes} bytes more a parameter on the drive" in text
    guessing = PlanRequest(guesses=True)  # its gradients go to the drive all the same
    assert "1.00 GiB more of host_memory_limit" in wear_of(guessing, ds_config=clipped)
    accumulates = PlanRequest(gradient_accumulation_steps=8)
    one_pass = 1 - written_tb(REQUEST) / written_tb(accumulates)
    found = wear_of(accumulates, ds_config=clipped)
    assert found.endswith(f"; {one_pass:.0%} less with one pass for each step (micro_batches)")


def test_a_setting_for_which_the_limit_has_no_room_is_not_named() -> None:
    shapes = builtin("Llama-3.1-8B")
    with pytest.raises(LimitTooSmallError) as error:
        derive(shapes, request=REQUEST, limit_bytes=1)
    least = error.value.minimum_bytes
    early = PlanRequest(during_backward=True)
    with pytest.raises(LimitTooSmallError):
        derive(shapes, request=early, limit_bytes=least)
    found = wear_of(REQUEST, ds_config={"gradient_clipping": 0.0}, limit_bytes=least)
    assert "during_backward" not in found
    assert "more of host_memory_limit" in found


def test_where_nothing_would_lower_it_no_setting_is_named() -> None:
    shapes = decoder()
    plan = derive(shapes, request=REQUEST, limit_bytes=100 * GIB)
    assert advise_wear(shapes, plan, parse_deepspeed(ADAM), parse_block({})) == ""
