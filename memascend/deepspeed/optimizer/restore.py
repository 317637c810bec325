"""Lists an optimizer's tensors for saving, and loads them from a checkpoint.

Both ways of stepping use it: sub-groups in tiles, and whole sub-groups in DeepSpeed's own swapper,
which keeps very small ones in memory. Both describe their tensors in the same form, so a checkpoint
of one can be loaded by the other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.swap_tensor.utils import AIO_ALIGNED_BYTES

from memascend.base.progress import byte_progress
from memascend.checkpoint.converted import converted
from memascend.checkpoint.manifest import SavedPowers
from memascend.checkpoint.source import LoadedTensor, counted
from memascend.config.deepspeed import Aio
from memascend.deepspeed.optimizer.beta_powers import BetaPowers, adam_of
from memascend.deepspeed.optimizer.choice import StepPath
from memascend.deepspeed.optimizer.fused_adam import MOMENTS
from memascend.deepspeed.optimizer.upstream import ReadBytes, Upstream
from memascend.deepspeed.plan.optimizers import moments, state_dtype
from memascend.errors import StoreError
from memascend.plan.optimizers import MOMENTUM
from memascend.streaming.optimizer.sub_group import is_code
from memascend.transfer.staging import StagingSlots

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the optimizer in the store.

    Attributes:
        sub_group: Index.
        state: Name of the state, None for the master weights.
        dtype: Dtype of its elements.
        numel: Number of its elements.
        read: Returns its bytes.
        file_name: Name of stock's file in the rank's folder.
        padded_bytes: Size of stock's file.
    """

    sub_group: int
    state: str | None
    dtype: torch.dtype
    numel: int
    read: ReadBytes
    file_name: str
    padded_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.numel * self.dtype.itemsize


# -- saving --------------------------------------------------------------------------------------


def stored_tensors(upstream: Upstream, steps: StepPath, aio: Aio) -> list[StoredTensor]:
    """Return the tensors that are on the drive, in the order of the sub-groups.

    Args:
        upstream: An optimizer whose states are on the drive.
        steps: Names its tensors.
        aio: The `aio` section of the DeepSpeed config, which sets the alignment of stock's files.
    """
    alignment = AIO_ALIGNED_BYTES * aio.intra_op_parallelism
    found = []
    named = zip(upstream.names, upstream.numels, strict=True)
    for sub_group, (name, numel) in enumerate(named):
        for state, dtype, read in steps.stored(name):
            stem = f"{state}-{name}" if state else name
            nbytes = numel * dtype.itemsize
            found.append(
                StoredTensor(
                    sub_group=sub_group,
                    state=state,
                    dtype=dtype,
                    numel=numel,
                    read=read,
                    file_name=f"{stem}.tensor.swp",
                    padded_bytes=-(-nbytes // alignment) * alignment,
                )
            )
    return found


# -- loading -------------------------------------------------------------------------------------


def restore(
    upstream: Upstream,
    steps: StepPath,
    slots: StagingSlots,
    state_dict: Mapping[str, Any],
    tensors: list[LoadedTensor],
    saved_powers: SavedPowers | None = None,
) -> None:
    """Load a checkpoint into an optimizer.

    Args:
        upstream: An optimizer whose states are on the drive.
        steps: Takes the tensors.
        slots: The staging slots, in which earlier writes may be in flight.
        state_dict: The base optimizer's, in which tensors listed in `tensors` are empty. An empty
            dict: load only the master weights.
        tensors: The tensors of every sub-group.
        saved_powers: Running powers of Adam's betas; None: unknown.

    Raises:
        StoreError: The drive failed; some of the tensors are loaded, others not.
        TornStepError: A step in DeepSpeed's own swapper ended half-way before.
    """
    tensors = _as_kept(upstream, steps, tensors)
    steps.begin_load()
    # Earlier write errors do not matter: every value is replaced.
    with suppress(StoreError):
        slots.wait_writes()
    if state_dict:
        steps.discard_states()
        with upstream.masters_in_groups():
            upstream.base.load_state_dict(state_dict)
    numels = upstream.numels
    nbytes = sum(numels[tensor.sub_group] * tensor.dtype.itemsize for tensor in tensors)
    with byte_progress("loading tensors", nbytes, leads=dist.get_rank() == 0) as advance:
        for tensor in tensors:
            steps.load_tensor(counted(tensor, advance))
            tensor.reader.close()
    if state_dict:
        replay_beta_powers(upstream, steps.powers, saved_powers)


def _as_kept(
    upstream: Upstream, steps: StepPath, tensors: list[LoadedTensor]
) -> list[LoadedTensor]:
    """Return the tensors, with Adam's moments converted to this run's dtype while they are read.

    Those in codes are in fp32 in files, and are encoded when they are stored. Muon's momentum, if
    it is not, has values of its narrower dtype already.
    """
    base, kept = upstream.base, {}
    if adam_of(base) is not None:
        dtype = state_dtype(base, upstream.master_dtype, steps.asked_dtype)
        kept = dict.fromkeys(MOMENTS, dtype) | moments(steps.asked_dtype)
    wanted: dict[str | None, torch.dtype] = {
        state: torch.float32 if is_code(one) else one for state, one in kept.items()
    }
    changes = {
        f"{tensor.dtype} to {wanted[tensor.state]}"
        for tensor in tensors
        if tensor.dtype != wanted.get(tensor.state, tensor.dtype)
    }
    if steps.momentum_dtype is not None:
        is_coded = is_code(steps.momentum_dtype)
        wanted[MOMENTUM] = torch.float32 if is_coded else steps.momentum_dtype
    if changes and dist.get_rank() == 0:
        log.info(
            "memascend: Adam's moments are in another dtype in the checkpoint than in this run. "
            "While they are loaded they go from %s: widened, which is exact, or rounded to nearest",
            " and from ".join(sorted(changes)),
        )
    coded = [one for one in (*kept.values(), steps.momentum_dtype) if one is not None]
    if tensors and any(map(is_code, coded)) and dist.get_rank() == 0:
        log.info(
            "memascend: moments are encoded in 8 bits while they are loaded: exact if a run with "
            "this state_dtype, as many ranks and this sub_group_size has saved them, else rounded "
            "to nearest"
        )
    return [converted(one, wanted.get(one.state, one.dtype)) for one in tensors]


def replay_beta_powers(
    upstream: Upstream, powers: BetaPowers | None = None, saved: SavedPowers | None = None
) -> None:
    """Set the running beta powers of DeepSpeed's Adam to those of a run that was not interrupted.

    The operator multiplies them by beta in fp32 at every step; if it begins at a later step it
    takes pow(), which is rounded differently, and the weights would differ. So steps are replayed
    on one unused element, at a few microseconds each: from the last one with pow() on, or all of
    them if that is unknown, which is right if the betas never changed.

    Args:
        upstream: The optimizer; does nothing unless a DeepSpeedCPUAdam steps a part of it.
        powers: Those of the fused step, which follow.
        saved: Those of the run that saved; None: unknown.
    """
    adam = adam_of(upstream.base)
    if adam is None:
        return
    scratch = [torch.zeros(1) for _ in range(4)]
    for step, betas in _calls_so_far(upstream, saved):
        adam.ds_opt_adam.adam_update(adam.opt_id, step, 0.0, *betas, 1.0, 0.0, True, *scratch)
        if powers is not None:
            powers.advance(step, betas)


def _calls_so_far(
    upstream: Upstream, saved: SavedPowers | None
) -> Iterator[tuple[int, tuple[float, float]]]:
    """Yield the step and the betas of calls that leave the operator as those of a whole run."""
    base, masters = upstream.base, enumerate(upstream.masters)
    stepped = {
        number: base.state[one] for number, one in masters if "step" in base.state.get(one, {})
    }
    steps = {int(state["step"]) for state in stepped.values()}
    if len(steps) != 1:
        return
    last = steps.pop()
    if saved is not None and saved.step == last:
        first, betas = max(saved.since, 1), (saved.beta1, saved.beta2)
        yield first + 1, betas  # so that the next one is no product, whatever was before
        yield from ((step, betas) for step in range(first, last + 1))
        return
    pairs = [tuple(upstream.hyperparameters(number)["betas"]) for number in stepped]
    # A third call with the same betas and step changes nothing; in some releases a second one does.
    calls = [pair for pair, run in groupby(pairs) for _ in islice(run, 2)]
    yield from ((step, pair) for step in range(1, last + 1) for pair in calls)
