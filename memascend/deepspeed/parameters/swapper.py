"""DeepSpeed's parameter swapper interface over our parameter stream.

Keeps the contract of AsyncPartitionedParameterSwapper (0.19.x): `param.ds_tensor` is one object
whose `.data` is re-pointed and whose `.status` follows PartitionedParamStatus. Unlike stock, a
gathered parameter holds no host buffer: its slot is released after the copy to the device.

With a budget every shard is on the drive, tiny ones included. A shard that gets no slot is a device
tensor meanwhile: assembled there when it is read, and the rank's slice of the gathered parameter
when it is written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from memascend.base.device_memory import RELEASED_BYTES_MIN
from memascend.base.interfaces import Event
from memascend.base.waiting import event_here
from memascend.deepspeed.attach.attachment import Attachment
from memascend.deepspeed.parameters.device import (
    device_shard,
    shares_memory,
    slice_of_rank,
    start_copy,
)
from memascend.deepspeed.parameters.exclusive import exclusive
from memascend.deepspeed.parameters.gathers_on_demand import GathersOnDemand
from memascend.deepspeed.parameters.module_trace import ReleaseDecisions
from memascend.deepspeed.parameters.stand_ins import StandIns
from memascend.errors import StoreError
from memascend.streaming.parameters.released_memory import ReleasedMemory
from memascend.streaming.parameters.shard import Shard
from memascend.streaming.parameters.stream import ParameterStream

#: A smaller shard always stays in host memory, as in stock DeepSpeed (MIN_AIO_BYTES).
SWAPPABLE_BYTES_MIN = 1 << 20
#: Bytes gathered in one turn. Fixed, so that every rank cuts the same list in the same places.
TURN_BYTES = 256 << 20
#: Result of available_swap_in_buffers. The stream limits the prefetch, in bytes.
PREFETCH_COUNT_MAX = 64

Parameter = Any


class ParameterSwapper:
    """One per zero.Init context; every parameter of that context has it as `nvme_swapper`."""

    def __init__(
        self,
        *,
        attachment: Attachment,
        stream: ParameterStream,
        dtype: torch.dtype,
        swappable_bytes_min: int = SWAPPABLE_BYTES_MIN,
        lock: AbstractContextManager[Any] | None = None,
        is_alone: bool = False,
        new_event: Callable[[], Event] | None = None,
        released_bytes_max: int = RELEASED_BYTES_MIN,
    ) -> None:
        """Take no memory yet.

        Args:
            attachment: The model's attachment.
            stream: The parameter stream. With a budget it takes shards of any size.
            dtype: The model's dtype, for the sizes of shards that do not exist yet.
            swappable_bytes_min: Without a budget: smaller shards stay in host memory.
            lock: The runtime's lock, reentrant; None: a new one.
            is_alone: Whether this is the only rank.
            new_event: Makes an event of the device; None when the device is the CPU.
            released_bytes_max: Limit of device memory of released parameters that kernels may still
                use.
        """
        self.lock = lock or threading.RLock()
        self.is_interrupted = False
        self.memascend_attachment = attachment
        self.dtype = dtype
        self.is_alone = is_alone
        self.gathers_on_demand = GathersOnDemand(self, is_alone=is_alone)
        self._stream, self._new_event = stream, new_event
        self._swappable_bytes_min = 1 if stream.pool.is_bounded else swappable_bytes_min
        self._released = ReleasedMemory(limit_bytes=released_bytes_max)
        self._before_change: Callable[[Collection[str]], None] = lambda keys: None
        self._check_values: Callable[[], None] = lambda: None
        self._shards: dict[int, Shard] = {}  # by ds_id; each is owned by its parameter
        # Slots that a collective may still read; released after the wait for it.
        self._gathering: dict[Shard, None] = {}
        self._stand_ins = StandIns()
        self.releases = ReleaseDecisions()

    # -- surface of the stock swapper ------------------------------------------------------------

    def swappable_tensor(self, param: Parameter = None, numel: int | None = None) -> bool:
        """Return whether a shard is kept on the drive; exactly one of the arguments is given."""
        if (param is None) == (numel is None):
            raise ValueError("swappable_tensor takes either param or numel")
        count = param.ds_tensor.ds_numel if numel is None else numel
        return bool(count * self.dtype.itemsize >= self._swappable_bytes_min)

    def available_swap_in_buffers(self) -> int:
        """Return how many further parameters DeepSpeed may ask to prefetch."""
        return PREFETCH_COUNT_MAX

    @exclusive
    def get_buffer(self, param: Parameter, numel: int) -> torch.Tensor:
        """Return memory for a parameter's first shard; the caller fills and stores it."""
        self._stream.let_go(self._shard(param, numel))
        return self._stage_outgoing(param, numel)

    def swap_out_and_release(
        self,
        params: Sequence[Parameter],
        async_op: bool = False,
        force_buffer_release: bool = False,
    ) -> None:
        """Store shards and release their slots; on return the bytes are in the store."""
        try:
            self._before_change([self.key(param) for param in params])  # without the lock
        except BaseException:
            self._drop_changes(params)
            raise
        self._write_all(params)

    @exclusive
    def _drop_changes(self, params: Sequence[Parameter]) -> None:
        for param in params:
            self._stream.drop(self._shard(param))
            self._mark_absent(param)

    @exclusive
    def _write_all(self, params: Sequence[Parameter]) -> None:
        for param in params:
            shard = self._shard(param)
            try:
                if shard.is_staged:
                    self._stream.write(shard)
                else:
                    self._stream.write_from(shard, device_shard(param))
            finally:
                self._show_changes()
                self._mark_absent(param)

    @exclusive
    def swap_in(self, params: Sequence[Parameter], async_op: bool = True) -> None:
        """Read shards and wait for them; with `async_op` only start reading ahead.

        A list may hold a parameter twice (a prefetch window spans forward and backward use), and
        parameters that are gathered or being read. Reading ahead starts as many reads as fit and
        skips parameters of other models, which a prefetch window may hold.
        """
        self._stand_ins.check()
        self._let_go_gathered()
        try:
            if async_op:
                own = [p for p in params if p.nvme_swapper is self]
                self._stream.prefetch([self._shard(p) for p in own if self._is_absent(p)])
            else:
                on_drive = [(p, self._shard(p)) for p in params if self._lives_on_drive(p)]
                self._stream.read_now(
                    [shard for p, shard in on_drive if shard.is_staged or self._is_absent(p)]
                )
        finally:
            self._show_changes()

    @exclusive
    def synchronize_reads(self) -> None:
        """Wait for every read in flight and make the shards available."""
        try:
            self._stream.wait_reads()
        finally:
            self._show_changes()

    @exclusive
    def synchronize_writes(self) -> None:
        """Wait for every write in flight; the first error is raised."""
        self._stream.wait_writes()

    @exclusive
    def remove_partition_and_release_buffers(self, params: Iterable[Parameter]) -> None:
        """Release shards without writing: the store has the same bytes. Idempotent."""
        for param in params:
            if param.ds_status is not ZeroParamStatus.INFLIGHT:  # else its gather releases it
                self._let_go(self._shard(param))

    @exclusive
    def swap_into_buffer(self, param: Parameter, dest_buffer: torch.Tensor) -> None:
        """Read a shard into the caller's memory; any alignment, any device."""
        shard = self._shard(param)
        self._stream.read_into(shard, dest_buffer.narrow(0, 0, shard.numel))

    def reserve_partitioned_swap_space(self, partition_num_elems: Sequence[int]) -> None:
        """Reserve nothing: updated shards are written from pool slots."""

    @exclusive
    def swap_out_partitioned_params(
        self, dst_fp16_params: Sequence[Parameter], src_fp32_params: Sequence[torch.Tensor]
    ) -> None:
        """Cast updated fp32 shards to the parameters' dtype and store them.

        The sources may be reused on return. Writes may still be in flight: a later read of the same
        parameter sees them, and synchronize_writes at the end of the step reports their errors.
        """
        try:
            for param, source in zip(dst_fp16_params, src_fp32_params, strict=True):
                self._stream.write_cast(self._shard(param), source)
        finally:
            self._show_changes()

    # -- called by our gather and step hooks, and by the optimizer ------------------------------

    def watch_changes(
        self, before: Callable[[Collection[str]], None], is_fixed: Callable[[str], bool]
    ) -> None:
        """Tell the optimizer of parameters that a script changes.

        Args:
            before: Called with their keys, without the lock, before their shards are stored.
            is_fixed: Returns whether a shard, by its key, must not be stored now: an error then.
        """
        self._before_change = before
        self._stream.is_fixed = is_fixed

    def watch_gathers(self, check: Callable[[], None]) -> None:
        """Have a function called before each gather, without the lock; it may refuse."""
        self._check_values = check

    @exclusive
    def turns(self, params: Iterable[Parameter]) -> list[list[Parameter]]:
        """Cut parameters into turns of limited bytes, each with at least one parameter.

        The limit is TURN_BYTES or the share of the budget, whichever is less. The order is that of
        the ids: DeepSpeed passes sets, whose order differs between ranks, and every rank must cut
        in the same places.
        """
        turns: list[list[Parameter]] = []
        turn_bytes = 0
        limit_bytes = min(TURN_BYTES, self._stream.share_bytes)
        for param in sorted(params, key=lambda param: param.ds_id):
            nbytes = self._shard(param).nbytes if self._lives_on_drive(param) else 0
            nbytes = max(nbytes, self._stream.pool.slot_bytes(nbytes))
            if not turns or turn_bytes + nbytes > limit_bytes:
                turns.append([])
                turn_bytes = 0
            turns[-1].append(param)
            turn_bytes += nbytes
        return turns

    @exclusive
    def would_wait(self, params: Iterable[Parameter]) -> list[Parameter]:
        """Return the parameters whose gathers would wait for the drive or the optimizer's walk."""
        return [
            param
            for param in params
            if not self._stream.background.has_passed(self.key(param))
            or (self._lives_on_drive(param) and not self._stream.has_arrived(self._shard(param)))
        ]

    @exclusive
    def start_copies(self, params: Iterable[Parameter]) -> None:
        """Start copying shards to the device, for a gather over several ranks.

        Upstream copies each shard while the host waits. Skips shards of a gather over one rank,
        which copies straight into the parameter, and does nothing on a synchronous device.
        """
        for param in params:
            shard = self._shards.get(param.ds_id)
            if shard is None or not shard.is_reused or shard.numel >= param.ds_numel:
                continue
            there = None if shard.tensor is None else start_copy(shard.tensor)
            if there is not None:
                param.ds_tensor.data = there

    @exclusive
    def note_released(self, nbytes: int) -> None:
        """Count the device memory of a released parameter, with an event on the current stream."""
        event = event_here(self._new_event)
        if event is not None:
            self._released.note(nbytes, event)

    def wait_for_updates(self, params: Iterable[Parameter]) -> None:
        """Wait until the optimizer's walk has written these parameters.

        Does not hold the lock, which hooks of other threads need meanwhile.

        Raises:
            StoreError: The walk failed before that.
            TornStepError: A step or a load ended half-way, and no load has mended it.
        """
        self._stream.background.wait_for([self.key(param) for param in params])
        self._check_values()

    @exclusive
    def wait_for_released(self) -> None:
        """Wait until kernels are done with enough released memory that more may be gathered."""
        self._released.wait()

    @exclusive
    def after_gather(self, params: Iterable[Parameter]) -> None:
        """Release the slots of gathered parameters, as soon as nothing reads them any more.

        On a synchronous device a gather over one rank makes the parameter an alias of the slot
        (stock then computes with memory that another parameter overwrites). The alias is replaced
        by a copy, unless it is of a device tensor, which is not reused.
        """
        on_drive = [(p, self._shard(p)) for p in params if self._lives_on_drive(p)]
        staged = [(param, shard) for param, shard in on_drive if shard.is_staged]
        event = event_here(self._new_event) if staged else None
        for param, shard in staged:
            there = shard.tensor if event is None else None
            is_alias = there is not None and shares_memory(param.data, there)
            if is_alias and shard.is_reused:
                param.data = param.data.clone()
            if event is None and not is_alias and param.ds_status is ZeroParamStatus.INFLIGHT:
                self._gathering[shard] = None
            else:
                self._let_go(shard, event)

    @exclusive
    def give_up(self, params: Sequence[Parameter]) -> None:
        """Make the parameters of a failed gather absent again.

        Nothing has computed with them. Copies and collectives may still fill their memory; it is
        reused in the order of the stream on which they were issued.
        """
        event = event_here(self._new_event)
        for param in params:  # all of them before the first wait
            if param.ds_status is not ZeroParamStatus.NOT_AVAILABLE:
                param.data = param.data.new_empty(0)
                param.ds_status = ZeroParamStatus.NOT_AVAILABLE
        for param in filter(self._lives_on_drive, params):
            with suppress(StoreError):  # the next read of the shard raises it
                self._let_go(self._shard(param), event)

    @exclusive
    def recast(self, param: Parameter, dtype: torch.dtype) -> None:
        """Convert a stored shard to another dtype, rounded to nearest; it must not be gathered.

        Raises:
            StoreError: The drive failed; the shard is lost.
        """
        try:
            self._stream.recast(self._shard(param), dtype, get_accelerator().current_device_name())
        finally:
            self._show_changes()
            self._mark_absent(param)

    @exclusive
    def stage_for_update(self, param: Parameter) -> None:
        """Give a gathered parameter's shard a slot, so that modified data can be partitioned.

        Also if the store has lent its own memory: only the store may write there.
        """
        shard = self._shard(param)
        if not shard.is_staged or shard.is_lent:
            param.ds_tensor.data = self._stage_outgoing(param, shard.numel).data
            param.ds_tensor.status = PartitionedParamStatus.AVAILABLE

    @exclusive
    def drop_unused(self) -> None:
        """Drop every host copy before a step changes the parameters.

        A shard that was read ahead, or kept after its use, would otherwise be stale after the step.

        Raises:
            StoreError: The script has written to an absent shard.
        """
        self._gathering.clear()
        self._stand_ins.check()
        try:
            self._stream.drop_all()
        finally:
            self._show_changes()

    def key(self, param: Parameter) -> str:
        """Return the store's key of a parameter's shard."""
        with self.lock:
            return self._shard(param).key

    # -- inner -----------------------------------------------------------------------------------

    def _shard(self, param: Parameter, numel: int | None = None) -> Shard:
        """Return the record of a parameter's shard; pass `numel` before `ds_tensor` exists.

        Raises:
            StoreError: The parameter belongs to another swapper.
        """
        shard = self._shards.get(param.ds_id)
        if shard is None:
            if param.nvme_swapper is not self:
                raise _of_another_model(param)
            count = param.ds_tensor.ds_numel if numel is None else numel
            shard = self._stream.shard(f"param.{param.ds_id}", count, param.dtype, owner=param)
            self._shards[param.ds_id] = shard
        return shard

    def _show_changes(self) -> None:
        # Callers use `finally`, not a context manager: Ctrl-C at the `yield` of its generator would
        # leave the rest to the garbage collector, which runs at any time and swallows a Ctrl-C.
        for shard in self._stream.take_changes():
            seen = shard.owner.ds_tensor
            if seen is None:
                continue  # DeepSpeed is about to create it
            if shard.is_coming:
                seen.status = PartitionedParamStatus.INFLIGHT
            elif shard.tensor is not None:
                seen.data = shard.tensor.data
                seen.status = PartitionedParamStatus.AVAILABLE
            else:
                self._mark_absent(shard.owner)

    def _stage_outgoing(self, param: Parameter, numel: int) -> torch.Tensor:
        """Return the memory into which DeepSpeed copies the rank's slice, to be stored."""
        try:
            slot = self._stream.stage(self._shard(param))
        finally:
            self._show_changes()
        return slice_of_rank(param, numel) if slot is None else slot

    @staticmethod
    def _lives_on_drive(param: Parameter) -> bool:
        return param.ds_tensor is not None and param.ds_tensor.final_location == "nvme"

    @staticmethod
    def _is_absent(param: Parameter) -> bool:
        return (
            param.ds_tensor.status is PartitionedParamStatus.NOT_AVAILABLE
            and param.ds_status is ZeroParamStatus.NOT_AVAILABLE
        )

    def _let_go_gathered(self) -> None:
        for shard in list(self._gathering):
            if shard.owner.ds_status is not ZeroParamStatus.INFLIGHT:
                self._let_go(shard)

    def recover(self) -> None:
        """Release every shard, in any state that an interrupted call has left."""
        gathering = [s for s in self._gathering if s.owner.ds_status is ZeroParamStatus.INFLIGHT]
        event = event_here(self._new_event)
        if event is not None:  # a copy out of a slot may have been issued and not noted yet
            event.synchronize()
        for shard in self._stream.recover(besides=gathering):
            self._gathering.pop(shard, None)
            if shard.owner.ds_tensor is not None:
                self._mark_absent(shard.owner)

    def _let_go(self, shard: Shard, event: Event | None = None) -> None:
        self._gathering.pop(shard, None)
        try:
            self._stream.let_go(shard, event)
        finally:
            self._show_changes()
            self._mark_absent(shard.owner)

    def _mark_absent(self, param: Parameter) -> None:
        # DeepSpeed reads an absent shard's dtype after a collective. It may differ from the
        # parameter's: a module may have been cast while it was partitioned.
        param.ds_tensor.data = self._stand_ins.of(self._shard(param).dtype, param.ds_id)
        param.ds_tensor.status = PartitionedParamStatus.NOT_AVAILABLE


def _of_another_model(param: Parameter) -> StoreError:
    key = f"param.{param.ds_id}"
    error = StoreError(
        f"{key!r} belongs to another model, or to another deepspeed.zero.Init context: its shard "
        "is not in this one's store. cause: a list of parameters of several models was given to "
        "the swapper of one of them. fix: pass each parameter to its own, param.nvme_swapper"
    )
    error.key = key
    return error
