"""An optimizer whose steps begin during backward, and one whose steps do not, without a model."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from memascend.config.block import parse_block
from memascend.deepspeed.optimizer.fused_adam import fused_adam
from memascend.nvme.store import MemoryFaults
from tests.support.streaming_hosts import memory_store
from tests.support.tiled_optimizer import NAMES, Optimizer, Swapper
from tests.support.tiled_training import SIZES, gradients

BF16 = torch.bfloat16
#: Those that hold anything of the first two members, of a third each; two of them are left to the
#: next forward pass, the fourth and the eighth of all.
LEFT_TILES = {NAMES[0]: 3 * 4096, NAMES[2]: 0}
TILES = sum(-(-(numel // 3 * 2) // 4096) for numel in SIZES.values()) - len(LEFT_TILES)


def make(
    *,
    early: bool = True,
    overlap: bool = True,
    faults: MemoryFaults | None = None,
    state_dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Any:
    made: Any = Optimizer(
        lambda p: DeepSpeedCPUAdam(p, lr=1e-2, betas=[0.9, 0.95]),
        state_count=2,
        store=memory_store(faults),
        state_dtype=state_dtype,
        spare_count=4,
    )
    made.keeps_bf16_states = state_dtype == BF16
    optimizer = {"during_backward": early, "overlap": overlap}
    made.runtime.config = parse_block({"streaming": {"optimizer": optimizer}})
    made._param_swapper = Swapper()
    made._fused = fused_adam(made.optimizer, made.training.tiles.shape)
    made.stream._take_over = made.runtime.store.take_over
    # Every parameter is on the drive.
    made.training.members = {name: made.training.members[name][:2] for name in NAMES}
    made.fp16_partitioned_groups_flat = [None] * len(NAMES)
    made.fp16_groups = [made._params(name) for name in NAMES]
    for param in (param for group in made.fp16_groups for param in group):
        param.ds_numel = param.ds_tensor.ds_numel
    made._get_param_partition_rank = lambda param: 0
    for name, value in changes.items():
        setattr(made, name, value)
    made.param_names = Names()
    made._set_up_early(made.training.tiles)
    return made


class Names:
    """Of parameters: their keys."""

    def __getitem__(self, param: Any) -> str:
        return str(param.key)


def backward(optimizer: Any, number: int, *, without: tuple[str, int] | None = None) -> None:
    """As the last micro-step gives gradients: of each member, from the last one on."""
    for name, value in reversed(gradients(number, BF16).items()):
        for index, member in reversed(list(enumerate(optimizer.training.members[name]))):
            if (name, index) != without:
                give(optimizer, name, value[member.offset : member.offset + member.numel], member)


def give(optimizer: Any, name: str, value: torch.Tensor, member: Any) -> None:
    """As partition_grads gives one: the last step has used the one before."""
    optimizer.runtime.background.finish()
    places = optimizer.tile_places(name, member.offset)
    accumulate = optimizer.micro_step_id != 0
    optimizer.gradient_stream.put(
        name, member.offset, value.clone(), accumulate=accumulate, places=places
    )
    optimizer.note_final(name, member.offset)


def step(optimizer: Any, *, is_left_out: bool = False) -> None:
    """As upstream steps, up to what it does last; or as where a norm is not finite."""
    try:
        if is_left_out:
            return
        optimizer.loss_scaler.update_scale(False)
        for index in range(len(NAMES)):
            optimizer._prepare_sub_group(index, None)
            optimizer.unscale_and_clip_grads(index, torch.tensor(0.0))
            optimizer._optimizer_step(index)
        optimizer._start_walk()
    finally:
        optimizer._end_step()


def all_early(optimizer: Any) -> None:
    """Wait until every tile that can be early is."""
    optimizer.runtime.background.run(lambda: None).result()


def values(optimizer: Any) -> list[torch.Tensor]:
    optimizer.finish_walk()
    found = []
    for name, parameter in zip(NAMES, optimizer.fp32_partitioned_groups_flat, strict=True):
        found.append(optimizer.training.parameter(name))
        states = (None, "exp_avg", "exp_avg_sq")
        found += [optimizer.training.master(name, state) for state in states]
        found.append(torch.tensor(optimizer.optimizer.state[parameter]["step"]))
    return found


def assert_equal(one: Any, other: Any) -> None:
    pairs = zip(values(one), values(other), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)


def train(optimizer: Any, numbers: range, **keywords: Any) -> None:
    for number in numbers:
        backward(optimizer, number)
        all_early(optimizer)
        step(optimizer, **keywords)


def change_rate(optimizer: Any) -> None:
    optimizer.optimizer.param_groups[0]["lr"] *= 0.5
