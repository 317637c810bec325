"""The registry of sub-groups: master weights and optimizer states in the store, by name.

Knows torch, the store, and the tiles and slots that bytes pass through; neither the order in which
sub-groups are stepped nor the optimizer's arithmetic. One thread at a time may call, except for
`get`, during which another thread may step other sub-groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress

import torch

from memascend.base.interfaces import TensorIO
from memascend.errors import StoreError
from memascend.kernels.halves import clear_flags
from memascend.streaming.optimizer.codes import CodedStates
from memascend.streaming.optimizer.halves import Halves
from memascend.streaming.optimizer.low_bits import HIGH_DTYPE, LowBits
from memascend.streaming.optimizer.sub_group import (
    FLAGS,
    SCALES,
    MasterForm,
    Member,
    SubGroup,
    check_sign,
    is_code,
    without_signs,
)
from memascend.streaming.optimizer.tile_memory import TileMemory
from memascend.transfer.staging import StagingSlots


class SubGroups:
    """All sub-groups of one optimizer."""

    def __init__(self, *, store: TensorIO, slots: StagingSlots, tiles: TileMemory) -> None:
        """Make an empty registry.

        Args:
            store: Stores the sub-groups.
            slots: Staging slots for single values, and whole keys that are loaded.
            tiles: Memory in which sub-groups are created; gives the master weights' dtype.
        """
        self.store = store
        self._slots = slots
        self._tiles = tiles
        self._halves = Halves(store=store, slots=slots)
        self._coded = CodedStates(store=store, slots=slots)
        self._groups: dict[str, SubGroup] = {}
        #: Dtypes of states that tiles do not have, in sub-groups that are created from now on.
        self.apart: Mapping[str, torch.dtype] = {}

    def create(
        self,
        name: str,
        numel: int,
        members: Sequence[Member],
        advance: Callable[[int], None] | None = None,
    ) -> SubGroup:
        """Add a sub-group, and store the values of its members as its master weights.

        Args:
            name: Name of the sub-group.
            numel: Its number of elements.
            members: Source of the values.
            advance: Called with the bytes of each tile.

        Raises:
            StoreError: The drive failed.
            StoreFullError: The drive has no room for it.
        """
        group = SubGroup(name, numel, apart=frozenset(self.apart))
        self.store.reserve(key=group.key(), nbytes=numel * self.master_dtype.itemsize)
        self._groups[name] = group
        for begin in self._tiles.begins(numel):
            tile = self._tiles.take(name, begin, numel)
            try:
                for member in members:
                    first, count = member.overlap(begin, tile.numel)
                    if count > 0:
                        target = tile.master.narrow(0, first - begin, count)
                        self._read_member(member, first - member.offset, target)
                self._tiles.write(tile, group.key(), tile.master)
                if advance is not None:
                    advance(tile.numel * self.master_dtype.itemsize)
            finally:
                self._tiles.retire(tile)
        return group

    def create_split(
        self,
        name: str,
        numel: int,
        members: Sequence[Member],
        *,
        low_bits: LowBits = LowBits.FLAGGED,
        flag_state: str = "",
    ) -> SubGroup:
        """Add a sub-group whose master weights are the values of its members, and low bits of 0.

        Nothing is read or written.

        Args:
            name: Name of the sub-group.
            numel: Its number of elements.
            members: Its parameters, in bf16, with a key each. They cover every element.
            low_bits: Form of the low bits.
            flag_state: With flags in signs: a state that is never negative, whose signs they will
                be.

        Raises:
            StoreFullError: The drive has no room for it.
        """
        group = SubGroup(
            name,
            numel,
            members=members,
            flag_state=FLAGS if low_bits is LowBits.BITS else flag_state,
            form=MasterForm.ROUNDED,
            low_bits=low_bits,
            apart=frozenset(self.apart),
        )
        self.store.reserve(key=group.key(), nbytes=numel * low_bits.dtype.itemsize)
        group.fills[None] = 0
        if group.has_bits:
            self.store.reserve(key=group.key(FLAGS), nbytes=group.stored_numel(FLAGS))
            group.fills[FLAGS] = 0
        self._groups[name] = group
        return group

    def _read_member(self, member: Member, begin: int, target: torch.Tensor) -> None:
        if member.tensor is not None:
            target.copy_(member.tensor.narrow(0, begin, target.numel()))
            return
        assert member.key is not None
        offset = begin * member.dtype.itemsize
        self._slots.read(key=member.key, target=target, offset_bytes=offset, dtype=member.dtype)

    def contains(self, name: str) -> bool:
        """Return whether a sub-group of this name exists."""
        return name in self._groups

    def group(self, name: str) -> SubGroup:
        """Return a sub-group."""
        return self._groups[name]

    def begins(self, name: str) -> range:
        """Return the first element of each tile of a sub-group."""
        return self._tiles.begins(self._groups[name].numel)

    @property
    def master_dtype(self) -> torch.dtype:
        """Dtype of all master weights."""
        return self._tiles.shape.master_dtype

    def add_state(
        self, name: str, state: str, dtype: torch.dtype, fill: float | None = None
    ) -> None:
        """Give a sub-group a state; with `fill` every element has that value until it is written.

        Raises:
            StoreFullError: The drive has no room for it.
        """
        group = self._groups[name]
        if is_code(dtype):
            self._add_scales(group, state)
        self.store.reserve(key=group.key(state), nbytes=group.numel * dtype.itemsize)
        self._note_state(group, state, dtype)
        if fill is not None:
            group.fills[state] = fill

    def _note_state(self, group: SubGroup, state: str, dtype: torch.dtype) -> None:
        """Note a state's dtype; states that tiles have blocks for stay in their order."""
        states = group.states | {state: dtype}
        known = [name for name in self._tiles.shape.moments if name in states]
        group.states = {name: states[name] for name in [*known, *states]}

    def _add_scales(self, group: SubGroup, state: str) -> None:
        """Give a sub-group scales of zero for all states in codes, unless it has them."""
        if group.coded:
            return
        group.coded = (state,) if state in group.apart else self._tiles.shape.coded
        nbytes = group.stored_numel(SCALES) * torch.float32.itemsize
        make_anew(self.store, group.key(SCALES), nbytes)
        group.fills[SCALES] = 0

    # -- single values ---------------------------------------------------------------------------

    def get(self, name: str, begin: int, target: torch.Tensor, *, state: str | None) -> None:
        """Fill a host tensor with a range of the master weights, or of a state, in its dtype."""
        group = self._groups[name]
        if state is None and group.is_split:
            with closing(self._halves.joined(group.half_keys(), begin, target.numel())) as parts:
                for first, weights in parts:
                    target.narrow(0, first - begin, weights.numel()).copy_(weights)
            return
        if state in group.fills:
            target.fill_(group.fills[state])
            return
        if state is not None and group.is_coded(state):
            keys = group.code_keys(state)
            with closing(self._coded.decoded(keys, begin, target.numel())) as parts:
                for first, values in parts:
                    target.narrow(0, first - begin, values.numel()).copy_(values)
            return
        stored = self._dtype(group, state)
        offset = begin * stored.itemsize
        self._slots.read(key=group.key(state), target=target, offset_bytes=offset, dtype=stored)
        if state == group.flag_state:
            target.abs_()  # signs are flags

    def set(self, name: str, begin: int, value: torch.Tensor, *, state: str | None) -> None:
        """Replace a range of the master weights, or of a state, rounded to nearest even.

        Raises:
            ValueError: A state that is never negative would be.
        """
        group = self._groups[name]
        self._tiles.drain()
        if state is None and group.is_split:
            self.keep_high(name)
            self._set_halves(group, begin, value)
            return
        if state is not None and state == group.flag_state:
            check_sign(group, state, value)
            self.keep_high(name)  # the flags are lost
        for unwritten in {state, SCALES} & set(group.fills):
            self._write_out(group, unwritten)
        if state is not None and group.is_coded(state):
            self._set_coded(group, state, begin, value)
            return
        stored = self._dtype(group, state)
        offset = begin * stored.itemsize
        self._slots.write(key=group.key(state), source=value, offset_bytes=offset, dtype=stored)
        self._slots.wait_writes()

    def _set_coded(self, group: SubGroup, state: str, begin: int, value: torch.Tensor) -> None:
        if group.states[state] == torch.uint8:
            check_sign(group, state, value)
        source = _parts_of(value)
        self._coded.fill(group.code_keys(state), begin, value.numel(), source)

    def _set_halves(self, group: SubGroup, begin: int, value: torch.Tensor) -> None:
        self._halves.fill(
            low_bits=group.low_bits,
            high=group.high_key,
            low=group.key(),
            begin=begin,
            numel=value.numel(),
            source=_parts_of(value),
        )

    def _dtype(self, group: SubGroup, state: str | None) -> torch.dtype:
        """Return the dtype of the values in a state's key, or in that of the master weights."""
        if state == FLAGS:
            return torch.uint8
        if state == SCALES:
            return torch.float32
        if state is not None:
            return group.states[state]
        return group.low_bits.dtype if group.is_split else self.master_dtype

    # -- halves ----------------------------------------------------------------------------------

    def keep_high(self, *names: str) -> None:
        """Store exact high halves: members are about to change, and master weights are not.

        Without effect if they are stored, or the weights are whole. No tile may be in flight.

        Raises:
            StoreFullError: The drive has no room for them; nothing has changed.
            StoreError: The drive failed; nothing has changed.
        """
        for group in map(self.group, names):
            if group.form is MasterForm.ROUNDED:
                make_anew(self.store, group.high_key, group.numel * HIGH_DTYPE.itemsize)
                self._halves.write_high(group.half_keys(), group.numel, group.high_key)
                if None in group.fills:
                    self._write_out(group, None)
                group.become(MasterForm.EXACT)

    def make_whole(self, name: str) -> None:
        """Store master weights as one key, for good: the optimizer will step them by itself.

        Raises:
            StoreFullError: The drive has no room for them; nothing has changed.
            StoreError: The drive failed; nothing has changed.
        """
        group = self._groups[name]
        if not group.is_split:
            return
        whole = SubGroup(name, group.numel)
        make_anew(self.store, whole.key(), group.numel * self.master_dtype.itemsize)
        with closing(self._halves.joined(group.half_keys(), 0, group.numel)) as parts:
            for first, weights in parts:
                offset = first * self.master_dtype.itemsize
                self.store.write(key=whole.key(), source=weights, offset_bytes=offset).wait()
        if None in group.fills:  # before: whole weights would be read as this value
            self._write_out(group, None)
        group.become(MasterForm.WHOLE)
        group.fills.pop(FLAGS, None)
        self._discard_unused(group)

    def discard_unused(self) -> None:
        """Discard halves that are not needed any more, also those that Ctrl-C has left."""
        for group in self._groups.values():
            self._discard_unused(group)

    def _discard_unused(self, group: SubGroup) -> None:
        if group.members and group.form is not MasterForm.EXACT:
            self.store.discard(key=group.high_key)
        if group.members and not group.is_split:
            self.store.discard(key=group.low_key)
            self.store.discard(key=group.key(FLAGS))

    # -- checkpoints -----------------------------------------------------------------------------

    def settle(self) -> None:
        """Write states that have one fill value, and wait until everything is in the store."""
        self._tiles.drain()
        for group in self._groups.values():
            for state in [name for name in group.fills if name is not None]:
                self._write_out(group, state)
        self._slots.wait_writes()

    def stream(self, name: str, state: str | None) -> Iterator[torch.Tensor]:
        """Yield the bytes of the master weights, or of a state, in order, each until the next.

        Raises:
            StoreError: The drive failed.
        """
        group = self._groups[name]
        if state is None and group.is_split:
            with closing(self._halves.joined(group.half_keys(), 0, group.numel)) as parts:
                for _, weights in parts:
                    yield weights.view(torch.uint8)
            return
        if state is not None and group.is_coded(state):
            with closing(self._coded.decoded(group.code_keys(state), 0, group.numel)) as parts:
                for _, values in parts:
                    yield values.view(torch.uint8)
            return
        stored = self._dtype(group, state)
        for staged in self._slots.stream(
            key=group.key(state), nbytes=group.numel * stored.itemsize
        ):
            if state == group.flag_state:
                clear_flags(staged.view(stored))
            yield staged

    def begin_load(self) -> None:
        """Prepare to replace all master weights: they need not be kept."""
        for group in self._groups.values():
            if group.form is MasterForm.ROUNDED:
                group.become(MasterForm.EXACT)

    def load(
        self,
        name: str,
        *,
        state: str,
        dtype: torch.dtype,
        source: Callable[[int, torch.Tensor], None],
    ) -> None:
        """Replace a state, which may be new, as a whole.

        Args:
            name: The sub-group.
            state: Name of the state.
            dtype: Dtype of the values: the stored one, or fp32 of a state that is stored in codes.
            source: Called with (offset, uint8 tensor); fills the tensor with the bytes from there.

        Raises:
            StoreError: The drive failed.
            ValueError: Values of a state that is never negative are.
        """
        group = self._groups[name]
        self._tiles.drain()
        if is_code(self._code_dtype(state)):
            self._load_coded(group, state, source)
            return
        nbytes = group.numel * dtype.itemsize
        if state == group.flag_state:
            self.keep_high(name)
            source = without_signs(group, state, dtype, source)
        make_anew(self.store, group.key(state), nbytes)
        self._note_state(group, state, dtype)
        group.fills.pop(state, None)
        self._slots.fill(key=group.key(state), nbytes=nbytes, source=source)

    def _load_coded(
        self, group: SubGroup, state: str, source: Callable[[int, torch.Tensor], None]
    ) -> None:
        self._add_scales(group, state)
        if SCALES in group.fills:  # those of another state lie between
            self._write_out(group, SCALES)
        dtype = self._code_dtype(state)
        assert dtype is not None
        self._note_state(group, state, dtype)
        make_anew(self.store, group.key(state), group.numel * dtype.itemsize)
        group.fills.pop(state, None)

        def fill(first: int, values: torch.Tensor) -> None:
            source(first * values.itemsize, values.view(torch.uint8))
            if dtype == torch.uint8:
                check_sign(group, state, values)

        self._coded.fill(group.code_keys(state), 0, group.numel, fill)

    def _code_dtype(self, state: str) -> torch.dtype | None:
        """Return the dtype of a state, if that is one of a form with codes."""
        return self.apart.get(state) or self._tiles.shape.moments.get(state)

    def load_halves(self, name: str, source: Callable[[int, torch.Tensor], None]) -> None:
        """Replace master weights in halves as a whole, and all members by them, rounded.

        Raises:
            StoreError: The drive failed; some of the values are new.
        """
        group = self._groups[name]
        for key, dtype in ((group.key(), group.low_bits.dtype), (group.high_key, HIGH_DTYPE)):
            make_anew(self.store, key, group.numel * dtype.itemsize)
        if group.has_bits:  # the next step writes them, in parts
            make_anew(self.store, group.key(FLAGS), group.stored_numel(FLAGS))
        if group.form is MasterForm.ROUNDED:
            group.become(MasterForm.EXACT)
        group.fills.pop(None, None)
        self._halves.fill(
            low_bits=group.low_bits,
            high=group.high_key,
            low=group.key(),
            begin=0,
            numel=group.numel,
            source=lambda first, weights: source(first * 4, weights.view(torch.uint8)),
            rounded=group.member_runs,
        )

    def discard_states(self) -> None:
        """Drop every state, as for a new optimizer; master weights stay."""
        with suppress(StoreError):  # of dropped states, or raised again by the next read
            self._tiles.drain()
        for group in self._groups.values():
            if group.flag_state in group.states:
                self.keep_high(group.name)  # the flags are lost
            self._discard_states(group)

    def _discard_states(self, group: SubGroup) -> None:
        for name in group.state_names:
            self.store.discard(key=group.key(name))
            group.fills.pop(name, None)
        group.states.clear()
        group.coded = ()

    def discard(self) -> None:
        """Discard all keys, and drop the sub-groups."""
        with suppress(StoreError):  # of values that are dropped
            self._tiles.drain()
        for group in self._groups.values():
            self._discard_states(group)
            for key in (group.key(), group.high_key, group.key(FLAGS)):
                self.store.discard(key=key)
        self._groups.clear()

    def _write_out(self, group: SubGroup, state: str | None) -> None:
        """Write values that are still one fill value, and wait for them."""
        dtype, fill = self._dtype(group, state), group.fills[state]
        numel = group.stored_numel(state)
        for begin, count in self._slots.chunks(numel, dtype.itemsize):
            staged = self._slots.take(count, dtype).fill_(fill)
            self._slots.submit(group.key(state), staged, begin * dtype.itemsize)
        self._slots.wait_writes()
        del group.fills[state]  # last: Ctrl-C may come anywhere


def _parts_of(values: torch.Tensor) -> Callable[[int, torch.Tensor], None]:
    """Return a source of a tensor's elements: (first element, target)."""

    def fill(first: int, target: torch.Tensor) -> None:
        target.copy_(values.narrow(0, first, target.numel()))

    return fill


def make_anew(store: TensorIO, key: str, nbytes: int) -> None:
    """Discard and reserve a key that is about to be written completely, in parts.

    After a failed write the store refuses to read a key until it is written in one piece;
    discarding the key clears that state.

    Raises:
        StoreFullError: The drive has no room for it.
    """
    store.discard(key=key)
    store.reserve(key=key, nbytes=nbytes)
