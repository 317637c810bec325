"""Advice from the plan: traffic that more host memory or one pass per step would save, and waste.

Wasteful are settings that take memory without an effect. Wear is the bytes that steps write.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from memascend.base.components import PARAMETERS_IN_CPU
from memascend.base.units import GIB, format_nbytes
from memascend.config.block import BLOCK_KEY, MemAscendConfig, MicroBatchConfig
from memascend.config.deepspeed import DeepSpeedSettings
from memascend.plan.derive import Plan, derive
from memascend.plan.knobs import LimitTooSmallError
from memascend.plan.request import PlanRequest, why_not_during_backward
from memascend.plan.shapes import ModelShapes
from memascend.plan.stock import BUFFERS, POOL, stock

#: By section of the JSON: a component of stock's account, and the keys that set its size.
_BUFFER_KEYS = {
    "offload_param": (POOL, ("buffer_count", "buffer_size")),
    "offload_optimizer": (BUFFERS, ("buffer_count",)),
}
#: The additional memory for which savings are computed.
MORE_BYTES = GIB
#: The unit in which makers state endurance; and steps for which writes are told.
_TB = 10**12
_STEPS = 1000


def advise(shapes: ModelShapes, plan: Plan) -> str:
    """Return a line with the traffic of a step that MORE_BYTES of host memory would save."""
    default = derive(shapes, request=plan.request)
    limit_bytes = plan.host_bytes if plan.limit_bytes is None else plan.limit_bytes
    if limit_bytes < default.host_bytes:
        return (
            f"host_memory_limit is {format_nbytes(limit_bytes)}, which makes buffers smaller than "
            f"their defaults; a limit of {format_nbytes(default.host_bytes)} or more does not"
        )
    now = _moved_bytes(plan)
    richer = derive(shapes, request=plan.request, limit_bytes=limit_bytes + MORE_BYTES)
    saved = now - _moved_bytes(richer)
    if saved <= 0:
        return "more host memory would save the drive nothing"
    return (
        f"{format_nbytes(MORE_BYTES)} more of host_memory_limit ({format_nbytes(limit_bytes)} now) "
        f"would save {format_nbytes(saved)} of the {format_nbytes(now)} that a step moves "
        f"({saved / now:.1%})"
    )


def advise_in_cpu(shapes: ModelShapes, plan: Plan) -> str:
    """Return a line about the memory that `max_in_cpu` takes; empty if it takes none."""
    in_cpu_bytes = plan.host.get(PARAMETERS_IN_CPU, 0)
    if not in_cpu_bytes:
        return ""
    request = replace(plan.request, max_in_cpu=0)
    least = derive(shapes, request=request)
    instead = derive(shapes, request=request, limit_bytes=plan.host_bytes)
    text = (
        f"offload_param.max_in_cpu takes {format_nbytes(in_cpu_bytes)} of host memory; without it "
        f"{format_nbytes(least.host_bytes)} instead of {format_nbytes(plan.host_bytes)} are enough"
    )
    saved = _moved_bytes(plan) - _moved_bytes(instead)
    if saved <= 0:
        return text
    return (
        f"{text}. As a host_memory_limit of {format_nbytes(plan.host_bytes)} the same memory would "
        f"save {format_nbytes(saved)} of the {format_nbytes(_moved_bytes(plan))} that a step moves"
    )


def advise_one_pass(
    shapes: ModelShapes,
    plan: Plan,
    settings: DeepSpeedSettings,
    micro_batches: MicroBatchConfig | None = None,
) -> str:
    """Return a line with the traffic that one pass would save; empty if nothing accumulates.

    `micro_batches` is the section of the block, as it is now.
    """
    steps = plan.request.gradient_accumulation_steps
    one_pass = replace(plan.request, gradient_accumulation_steps=1)
    now = _moved_bytes(plan)
    then = _moved_bytes(derive(shapes, request=one_pass, limit_bytes=plan.limit_bytes))
    if steps == 1 or then >= now:
        return ""
    batch = settings.train_micro_batch_size_per_gpu
    wanted = batch * steps if batch else f"{steps} times its value"
    section = {} if micro_batches is None else micro_batches.model_dump(exclude_defaults=True)
    if micro_batches is None or isinstance(micro_batches.count, int):
        section["count"] = steps * section.get("count", 1)
    block = json.dumps({"micro_batches": section})
    return (
        f"accumulation over {steps} micro-steps moves {format_nbytes(now)} in a step; one pass "
        f"over the same sequences would move {format_nbytes(then)} ({1 - then / now:.0%} less). "
        f"Set train_micro_batch_size_per_gpu to {wanted} and gradient_accumulation_steps to 1 (or "
        f'the Trainer\'s arguments for them), and add "{BLOCK_KEY}": {block}. It needs gradient '
        "checkpointing; `memascend plan --context` has its device memory"
    )


def advise_wear(
    shapes: ModelShapes,
    plan: Plan,
    settings: DeepSpeedSettings,
    block: MemAscendConfig,
    *,
    ranks: int = 1,
    left_bytes: int | None = None,
) -> str:
    """Return a line with the bytes that steps write, and the setting that would lower them most.

    Args:
        shapes: The model.
        plan: Of one rank.
        settings: DeepSpeed's.
        block: As it is now.
        ranks: Ranks that write to the same drives, taken to be alike.
        left_bytes: Bytes that the drives say they may still be written; `wear.endurance` comes
            before it.
    """
    step_bytes = ranks * _written_bytes(plan)
    if not step_bytes:
        return ""
    total_bytes = _STEPS * step_bytes
    text = f"{_STEPS} steps write {_show_tb(total_bytes)} to the drives"
    endurance, source = block.wear.endurance, "wear.endurance states"
    if endurance is None:
        endurance, source = left_bytes, "the drives' own SMART data leaves"
    if endurance:
        text += f", {total_bytes / endurance:.2%} of the {_show_tb(endurance)} that {source}"
    least_bytes, setting = step_bytes, ""
    for request, limit, name in _fewer_writes(plan, settings, block):
        with suppress(LimitTooSmallError):  # a limit at its smallest has no room for it
            nbytes = ranks * _written_bytes(derive(shapes, request=request, limit_bytes=limit))
            least_bytes, setting = min((least_bytes, setting), (nbytes, name))
    if not setting:
        return text
    return f"{text}; {1 - least_bytes / step_bytes:.0%} less with {setting}"


def _fewer_writes(
    plan: Plan, settings: DeepSpeedSettings, block: MemAscendConfig
) -> Iterator[tuple[PlanRequest, int | None, str]]:
    """Yield what could be set without a change of the results: request, limit, name."""
    request, limit = plan.request, plan.limit_bytes
    if request.gradient_accumulation_steps > 1:
        one_pass = replace(request, gradient_accumulation_steps=1)
        yield one_pass, limit, "one pass for each step (micro_batches)"
    optimizer = block.streaming.optimizer.model_copy(update={"during_backward": True})
    streaming = block.streaming.model_copy(update={"optimizer": optimizer})
    early = block.model_copy(update={"streaming": streaming})
    if not request.during_backward and not why_not_during_backward(
        early, settings, world=request.world
    ):
        key = "streaming.optimizer.during_backward: true"
        name = f"{key}, for {request.second_values_bytes:.3g} bytes more a parameter on the drive"
        name = key if request.is_muon else name  # whose matrices have second values in any case
        early_request = replace(request, during_backward=True, tries_during_backward=False)
        yield early_request, limit, name
    more = (plan.host_bytes if limit is None else limit) + MORE_BYTES
    yield request, more, f"{format_nbytes(MORE_BYTES)} more of host_memory_limit"


def advise_pinning(
    shapes: ModelShapes, plan: Plan, settings: DeepSpeedSettings, *, locks_for_nothing: bool = False
) -> str:
    """Return a line about memory settings that have no effect; empty if none are stated.

    With `locks_for_nothing` no device copies from the memory that `pin_memory` locks.
    """
    account = stock(shapes, request=plan.request, settings=settings).host
    idle, idle_bytes, pinned = [], 0, []
    for part, (component, keys) in _BUFFER_KEYS.items():
        stated = getattr(settings.zero_optimization, part).stated
        found = [f"{part}.{key}" for key in keys if key in stated]
        if found and account[component]:
            idle += found
            idle_bytes += account[component]
        if "pin_memory" in stated and getattr(settings.zero_optimization, part).pin_memory:
            pinned.append(f"{part}.pin_memory")
    lines = []
    if idle:
        lines.append(
            f"no effect here: {', '.join(idle)}. DeepSpeed's buffers of this number and size, "
            f"{format_nbytes(idle_bytes)}, are not allocated"
        )
    if pinned and locks_for_nothing:
        lines.append(
            f"{', '.join(pinned)} locks {format_nbytes(plan.host_bytes)} without a benefit, since "
            "there is no GPU to copy from it; set it to false"
        )
    return "; ".join(lines)


def _show_tb(nbytes: int) -> str:
    count = nbytes / _TB
    return f"{count:,.0f} TB" if count >= 100 else f"{count:.3g} TB"


def _moved_bytes(plan: Plan) -> int:
    return sum(plan.read_bytes.values()) + _written_bytes(plan)


def _written_bytes(plan: Plan) -> int:
    return sum(plan.written_bytes.values())
