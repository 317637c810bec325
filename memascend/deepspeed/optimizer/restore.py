"""Tensors of an optimizer for a checkpoint, and how it takes them back.

The same for both ways of stepping: sub-groups in tiles, and whole ones in DeepSpeed's own swapper,
which keeps sub-groups too small for a drive in memory. Between the two a checkpoint may be
exchanged, since both describe their tensors in the same terms.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.swap_tensor.utils import AIO_ALIGNED_BYTES

from memascend.base.progress import byte_progress
from memascend.checkpoint.converted import converted
from memascend.checkpoint.source import LoadedTensor, counted
from memascend.config.deepspeed import Aio
from memascend.deepspeed.optimizer.fused_adam import MOMENTS
from memascend.deepspeed.plan.optimizers import state_dtype
from memascend.errors import StoreError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the optimizer in the store.

    Attributes:
        sub_group: Index.
        state: Name of the state, None for the master weights.
        dtype: Of its elements.
        numel: Elements.
        key: In the store.
        file_name: Stock's, in the rank's folder.
        padded_bytes: Size of stock's file.
    """

    sub_group: int
    state: str | None
    dtype: torch.dtype
    numel: int
    key: str
    file_name: str
    padded_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.numel * self.dtype.itemsize


# -- saving --------------------------------------------------------------------------------------


def stored_tensors(optimizer: Any, aio: Aio) -> list[StoredTensor]:
    """Return everything that is not in memory, in the order of the sub-groups.

    Args:
        optimizer: Any of ours whose states are on a drive.
        aio: The section of the DeepSpeed config: stock reads files in units that it decides.
    """
    alignment = AIO_ALIGNED_BYTES * aio.intra_op_parallelism
    found = []
    for sub_group, parameter in enumerate(optimizer.fp32_partitioned_groups_flat):
        name = parameter.ds_id
        numel = optimizer.fp16_partitioned_groups_flat_numel[sub_group]
        for state, dtype, key in optimizer.stored(name):
            stem = f"{state}-{name}" if state else name
            nbytes = numel * dtype.itemsize
            found.append(
                StoredTensor(
                    sub_group=sub_group,
                    state=state,
                    dtype=dtype,
                    numel=numel,
                    key=key,
                    file_name=f"{stem}.tensor.swp",
                    padded_bytes=-(-nbytes // alignment) * alignment,
                )
            )
    return found


# -- loading -------------------------------------------------------------------------------------


def restore(optimizer: Any, state_dict: Mapping[str, Any], tensors: list[LoadedTensor]) -> None:
    """Give an optimizer what a checkpoint holds.

    Args:
        optimizer: Any of ours whose states are on a drive.
        state_dict: The base optimizer's; tensors that are in `tensors` have no elements there.
            Without keys: master weights alone are loaded.
        tensors: Of every sub-group.

    Raises:
        StoreError: The drive failed; some of the tensors are loaded, others not.
        TornStepError: Half a step of DeepSpeed's own swapper came before.
    """
    tensors = _as_kept(optimizer, tensors)
    optimizer.begin_load()
    # What failed until now was raised, and all of it is replaced.
    with suppress(StoreError):
        optimizer.attachment.runtime.staging.wait_writes()
    if state_dict:
        optimizer.forget_states()
        optimizer._set_fp32_optimizer_param_groups()
        optimizer.optimizer.load_state_dict(state_dict)
        optimizer._clear_fp32_optimizer_param_groups()
    numels = optimizer.fp16_partitioned_groups_flat_numel
    nbytes = sum(numels[tensor.sub_group] * tensor.dtype.itemsize for tensor in tensors)
    with byte_progress("loading tensors", nbytes, leads=dist.get_rank() == 0) as advance:
        for tensor in tensors:
            optimizer.load_tensor(counted(tensor, advance))
            tensor.reader.close()
    if state_dict:
        parameters = optimizer.fp32_partitioned_groups_flat
        replay_beta_powers(optimizer.optimizer, parameters, optimizer.note_replayed)


def _as_kept(optimizer: Any, tensors: list[LoadedTensor]) -> list[LoadedTensor]:
    """Return tensors of a checkpoint with Adam's moments in the dtype that this run keeps them in.

    Those of a run that keeps them in another one are converted while they are read.
    """
    base = optimizer.optimizer
    if type(base) is not DeepSpeedCPUAdam:
        return tensors
    master = optimizer.master_weights_and_grads_dtype
    wanted = state_dtype(base, master, in_bf16=optimizer.keeps_bf16_states)
    found = {tensor.dtype for tensor in tensors if tensor.state in MOMENTS} - {wanted}
    if found and dist.get_rank() == 0:
        log.info(
            "memascend: Adam's moments are in %s in the checkpoint and in %s in this run: they are "
            "%s while they are loaded",
            ", ".join(map(str, found)),
            wanted,
            "widened, which is exact," if wanted == torch.float32 else "rounded to nearest",
        )
    return [converted(tensor, wanted) if tensor.state in MOMENTS else tensor for tensor in tensors]


def replay_beta_powers(
    optimizer: Any, parameters: list[torch.Tensor], note: Callable[[int, tuple[float, float]], None]
) -> None:
    """Bring what DeepSpeed's Adam knows beside its states to where the saved run had it.

    It multiplies the powers of its betas up in fp32, a factor a step. One that begins at a later
    step takes them from pow(), which rounds differently after a few steps, and so do the weights.
    Steps on one element that nobody uses, at a few microseconds each, give the same powers.

    Args:
        optimizer: Nothing is done for any but DeepSpeedCPUAdam.
        parameters: Those it has states of.
        note: Called with each step and its betas: who else carries such powers replays it too.
    """
    if type(optimizer) is not DeepSpeedCPUAdam:
        return
    steps = {int(optimizer.state[p].get("step", 0)) for p in parameters if p in optimizer.state}
    if len(steps) != 1:
        return
    betas: list[tuple[float, float]] = []
    for group in optimizer.param_groups:
        if not betas or betas[-1] != group["betas"]:
            betas.append(group["betas"])
    scratch = [torch.zeros(1) for _ in range(4)]
    for step in range(1, steps.pop() + 1):
        for beta1, beta2 in betas:
            optimizer.ds_opt_adam.adam_update(
                optimizer.opt_id, step, 0.0, beta1, beta2, 1.0, 0.0, True, *scratch
            )
            note(step, (beta1, beta2))
