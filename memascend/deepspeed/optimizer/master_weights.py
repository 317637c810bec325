"""Master weights of tiled sub-groups: whole in a key of their own, or in two parts.

The high one of two is the bf16 parameter that forward uses, so that a step writes two bytes less
for each weight, and the start writes none. Two rules keep that exact. A script may change such a
parameter outside of the step (GatheredParameters, a state dict loaded into the module), which with
CPU offload leaves the master weights alone: so their high halves are stored before. And only the
fused step knows parts: before the optimizer steps by itself, its sub-groups become whole, for
good.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from deepspeed import comm as dist

from memascend.base.progress import byte_progress
from memascend.config.block import OptimizerStreamConfig
from memascend.deepspeed.optimizer.fused_adam import FLAG_STATE, FusedAdam, OwnSteps
from memascend.deepspeed.optimizer.fused_muon import FusedMuon
from memascend.deepspeed.optimizer.upstream import Original, Upstream
from memascend.deepspeed.parameters.gather import swapper_of
from memascend.deepspeed.stock.host_buffers import AbsentBuffers
from memascend.plan.optimizer_dtypes import BF16_8, INT8
from memascend.streaming.optimizer.low_bits import HIGH_DTYPE, LowBits
from memascend.streaming.optimizer.step import Begins
from memascend.streaming.optimizer.sub_group import MasterForm, Member
from memascend.streaming.optimizer.sub_group_step import FusedUpdate
from memascend.streaming.optimizer.sub_groups import SubGroups


def low_bits(
    section: OptimizerStreamConfig,
    fused: FusedAdam | FusedMuon | OwnSteps,
    group: Mapping[str, Any],
) -> LowBits | None:
    """Return the form of master weights beside bf16 parameters; None: they are whole.

    Args:
        section: The block's.
        fused: The optimizer's fused steps.
        group: Hyperparameters of the sub-group.
    """
    if not section.split_master or not fused.fuses(group):
        return None
    if section.master_dtype == BF16_8:
        return LowBits.REMAINDERS
    if section.state_dtype == INT8:
        return LowBits.UNFLAGGED
    return LowBits.BITS if group.get("use_muon") else LowBits.FLAGGED


class MasterWeights:
    """Creates the master weights of one optimizer, and keeps them while a script changes others."""

    def __init__(
        self,
        upstream: Upstream,
        groups: SubGroups,
        *,
        low_bits: Callable[[Mapping[str, Any]], LowBits | None],
        at_rest: Callable[[Callable[[], object]], None],
    ) -> None:
        """Start without sub-groups.

        Args:
            upstream: The optimizer.
            groups: Holds the master weights.
            low_bits: Returns the form of low bits for the hyperparameters of a sub-group; None:
                none are wanted, or steps are not fused.
            at_rest: Calls its argument when neither a step nor a tile is under way.
        """
        self._upstream, self._groups = upstream, groups
        self._low_bits = low_bits
        self._at_rest = at_rest
        self._owner_of: dict[str, str] = {}  # key of a parameter: its sub-group
        # Called with the bytes of master weights stored since the last call.
        self._advance: Callable[[int], None] | None = None

    def create_all(self, original: Original) -> None:
        """Make master weights as DeepSpeed, sub-group by sub-group.

        DeepSpeed allocates a buffer of a whole sub-group, which stays unused.
        """
        numels = self._upstream.numels
        written = sum(
            numel for number, numel in enumerate(numels) if self._low_bits_of(number) is None
        )
        nbytes = written * self._upstream.master_dtype.itemsize
        leads = dist.get_rank() == 0 and nbytes > 0
        with (
            byte_progress("writing master weights", nbytes, leads=leads) as self._advance,
            AbsentBuffers(torch.empty, set(numels)),
        ):
            original()

    def create(self, number: int) -> None:
        """Create the master weights of a sub-group from its parameters."""
        upstream = self._upstream
        name, numel = upstream.masters[number].ds_id, upstream.numels[number]
        members = upstream.members(number)
        low_bits = self._low_bits_of(number)
        if low_bits is None or not _can_split(members, numel):
            self._groups.create(name, numel, members, self._advance)
            return
        self._groups.create_split(
            name,
            numel,
            members,
            low_bits=low_bits,
            flag_state=FLAG_STATE if low_bits is LowBits.FLAGGED else "",
        )
        for member, param in zip(members, upstream.params[number], strict=True):
            assert member.key is not None
            self._owner_of[member.key] = name
            swapper = swapper_of(param)
            assert swapper is not None
            swapper.watch_changes(self.keep_high, self.is_fixed)

    def _low_bits_of(self, number: int) -> LowBits | None:
        """Return the form of a sub-group's low bits, if its parameters may be split."""
        if self._upstream.master_dtype != torch.float32:
            return None
        return self._low_bits(self._upstream.hyperparameters(number))

    def keep_high(self, keys: Collection[str]) -> None:
        """Store the high halves of weights whose parameters, of these keys, are about to change.

        Raises:
            StoreError: The last step failed, or the drive; nothing has changed.
        """
        # Also if they are stored already: a step under way may be about to drop them.
        owners = sorted({self._owner_of[key] for key in keys if key in self._owner_of})
        if owners:
            self._at_rest(partial(self._groups.keep_high, *owners))

    def is_fixed(self, key: str) -> bool:
        """Return whether a parameter is the high half of its master weights."""
        owner = self._owner_of.get(key)
        return owner is not None and self._groups.group(owner).form is MasterForm.ROUNDED

    def make_whole(self, updates: Sequence[FusedUpdate | None], early: Begins) -> None:
        """Store whole master weights of the sub-groups that the optimizer steps by itself.

        Those that were stepped early have second values in their present form.

        Raises:
            StoreFullError: The drive has no room for them; nothing has changed.
        """
        for name, update in zip(self._upstream.names, updates, strict=True):
            if update is None and name not in early:
                self._groups.make_whole(name)

    def discard(self) -> None:
        """Discard all; parameters may change then."""
        self._owner_of.clear()
        self._groups.discard()


def _can_split(members: Sequence[Member], numel: int) -> bool:
    """Return whether all values of a sub-group are bf16 on the drive.

    A script may change those in memory without a call.
    """
    return (
        all(one.key is not None and one.dtype == HIGH_DTYPE for one in members)
        and sum(one.numel for one in members) == numel
    )
