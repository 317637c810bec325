"""What of an optimizer belongs in a checkpoint, and how it takes it back.

The same for both ways of stepping: sub-groups that are streamed, and whole ones in DeepSpeed's own
swapper, which keeps sub-groups too small for a drive in memory. Between the two a checkpoint may be
exchanged, since both are described here in the same terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.swap_tensor.constants import AIO_INTRA_OP_PARALLELISM
from deepspeed.runtime.swap_tensor.utils import AIO_ALIGNED_BYTES

from memascend.checkpoint.files import Reader
from memascend.deepspeed.optimizer.swapper import StreamedSwapper
from memascend.errors import StoreError, TornStepError

if TYPE_CHECKING:
    from memascend.deepspeed.optimizer.optimizer import ZeroOptimizer


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


@dataclass(frozen=True, slots=True)
class LoadedTensor:
    """A tensor of a checkpoint, not read yet; `state` is None for the master weights."""

    sub_group: int
    state: str | None
    dtype: torch.dtype
    reader: Reader


def all_keys(swapper: Any) -> Iterator[str]:
    """Every key in the store of a swapper of DeepSpeed's, gradients included."""
    for swap_info in swapper.swap_params_info.values():
        yield from swap_info.get_swap_paths()
        yield from swap_info.get_swap_gradient_paths()


# -- saving --------------------------------------------------------------------------------------


def stored_tensors(optimizer: ZeroOptimizer, aio: Mapping[str, Any]) -> list[StoredTensor]:
    """Everything that is not in memory, in the order of the sub-groups.

    Args:
        optimizer: Any of ours whose states are on a drive.
        aio: The section of the DeepSpeed config: stock reads files in units that it decides.
    """
    swapper = optimizer.optimizer_swapper
    alignment = AIO_ALIGNED_BYTES * int(aio.get(AIO_INTRA_OP_PARALLELISM, 1))
    found = []
    for sub_group, parameter in enumerate(optimizer.fp32_partitioned_groups_flat):
        name = parameter.ds_id
        numel = optimizer.fp16_partitioned_groups_flat_numel[sub_group]
        for state, dtype, key in _keys(swapper, name):
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


def settle(optimizer: ZeroOptimizer) -> None:
    """Has everything in the store: values of tiles in flight, and what so far is one value.

    Raises:
        TornStepError: The last step or load ended half-way.
    """
    optimizer.wholeness.check()
    if isinstance(optimizer.optimizer_swapper, StreamedSwapper):
        optimizer.optimizer_swapper.stream.settle()


def _keys(swapper: Any, name: str) -> Iterator[tuple[str | None, torch.dtype, str]]:
    if isinstance(swapper, StreamedSwapper):
        group = swapper.stream.group(name)
        yield None, swapper.stream.master_dtype, group.key()
        for state, dtype in group.states.items():
            yield state, dtype, group.key(state)
        return
    swap_info = swapper.swap_params_info.get(name)
    if swap_info is None:
        return  # in memory
    for number, context in enumerate(swap_info.tensors):
        # The first holds the master weights, whose name has no state before it.
        owner = str(context.compute_tensor.ds_id)
        state_name = owner.removesuffix(f"-{name}") if number > 0 else None
        yield state_name, swapper.dtype, context.swap_path


# -- loading -------------------------------------------------------------------------------------


def restore(
    optimizer: ZeroOptimizer, state_dict: Mapping[str, Any], tensors: list[LoadedTensor]
) -> None:
    """Gives an optimizer what a checkpoint holds.

    Args:
        optimizer: Any of ours whose states are on a drive.
        state_dict: The base optimizer's; tensors that are in `tensors` have no elements there.
            Without keys: master weights alone are loaded.
        tensors: Of every sub-group.

    Raises:
        StoreError: The drive failed; some of the tensors are loaded, others not.
        TornStepError: Half a step of DeepSpeed's own swapper came before.
    """
    is_streamed = isinstance(optimizer.optimizer_swapper, StreamedSwapper)
    if optimizer.wholeness.is_torn and not is_streamed:
        raise TornStepError(
            "cannot load a checkpoint after half an optimizer step: without streaming.optimizer "
            "DeepSpeed's buffers of that step are not given back. fix: start the program again "
            "and load it there"
        )
    optimizer.wholeness.note_change()
    # What failed until now is told, and all of it is replaced.
    with suppress(StoreError):
        if is_streamed:
            optimizer.optimizer_swapper.stream.drain()
    with suppress(StoreError):
        optimizer.attachment.runtime.staging.wait_writes()
    if state_dict:
        _drop_states(optimizer)
        optimizer._set_fp32_optimizer_param_groups()
        optimizer.optimizer.load_state_dict(state_dict)
        optimizer._clear_fp32_optimizer_param_groups()
    for tensor in tensors:
        if is_streamed:
            _into_stream(optimizer, tensor)
        elif optimizer._swappable_optimizer_subgroup(tensor.sub_group):
            _into_swapper(optimizer, tensor)
        else:
            _into_memory(optimizer, tensor)
        tensor.reader.close()
    if state_dict:
        replay_beta_powers(optimizer.optimizer, optimizer.fp32_partitioned_groups_flat)


def _drop_states(optimizer: ZeroOptimizer) -> None:
    swapper = optimizer.optimizer_swapper
    if isinstance(swapper, StreamedSwapper):
        swapper.stream.forget_states()
        return
    store = optimizer.attachment.runtime.io
    for swap_info in swapper.swap_params_info.values():
        for context in swap_info.tensors[1:]:
            store.discard(key=context.swap_path)
        del swap_info.tensors[1:]
        swap_info.has_state_tensors = False


def _into_stream(optimizer: ZeroOptimizer, tensor: LoadedTensor) -> None:
    parameter = optimizer.fp32_partitioned_groups_flat[tensor.sub_group]
    optimizer.optimizer_swapper.stream.load(
        parameter.ds_id, state=tensor.state, dtype=tensor.dtype, source=tensor.reader.fill
    )
    if tensor.state is not None:
        optimizer.optimizer.state[parameter][tensor.state] = torch.empty(0, dtype=tensor.dtype)


def _into_swapper(optimizer: ZeroOptimizer, tensor: LoadedTensor) -> None:
    swapper = optimizer.optimizer_swapper
    parameter = optimizer.fp32_partitioned_groups_flat[tensor.sub_group]
    swap_info = swapper.swap_params_info[parameter.ds_id]
    if tensor.state is not None:
        value = torch.empty(0, dtype=tensor.dtype)
        value.ds_id = f"{tensor.state}-{parameter.ds_id}"  # type: ignore[attr-defined]
        optimizer.optimizer.state[parameter][tensor.state] = value
        swap_info.add_state_tensors([value])
    runtime = optimizer.attachment.runtime
    context = swap_info.tensors[-1 if tensor.state is not None else 0]
    nbytes = swapper._io_aligned_numel(swap_info.numel()) * tensor.dtype.itemsize
    runtime.io.reserve(key=context.swap_path, nbytes=nbytes)
    runtime.staging.fill(key=context.swap_path, nbytes=nbytes, source=tensor.reader.fill)


def _into_memory(optimizer: ZeroOptimizer, tensor: LoadedTensor) -> None:
    parameter = optimizer.fp32_partitioned_groups_flat[tensor.sub_group]
    numel = optimizer.fp16_partitioned_groups_flat_numel[tensor.sub_group]
    value = torch.empty(numel, dtype=tensor.dtype)
    tensor.reader.fill(0, value.view(torch.uint8))
    if tensor.state is None:
        parameter.data.copy_(value)
    else:
        optimizer.optimizer.state[parameter][tensor.state] = value.to(parameter.device)


def replay_beta_powers(optimizer: Any, parameters: list[torch.Tensor]) -> None:
    """Brings what DeepSpeed's Adam knows beside its states to where the saved run had it.

    It multiplies the powers of its betas up in fp32, a factor a step. One that begins at a later
    step takes them from pow(), which rounds differently after a few steps, and so do the weights.
    Steps on one element that nobody uses, at a few microseconds each, give the same powers.
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
