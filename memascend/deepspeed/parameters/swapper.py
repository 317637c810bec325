"""DeepSpeed's parameter swapper surface over our parameter path.

Keeps the contract of AsyncPartitionedParameterSwapper (0.19.x): `param.ds_tensor` is one object
whose `.data` is re-pointed and whose `.status` follows PartitionedParamStatus. Unlike stock, a
gathered parameter holds no host buffer: its slot goes back when the copy to the device has passed,
so the pool does not grow with max_reuse_distance, and a list larger than the pool is served in
turns.

With a budget every shard is on the drive, tiny ones included, and one that has no slot is a device
tensor while it is read or written: its `ds_tensor.data` is then assembled on the device, or is the
rank's own slice of the whole parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from memascend.base.interfaces import Event
from memascend.deepspeed.attach.attachment import Attachment
from memascend.streaming.budget import Budget
from memascend.streaming.parameters import ParameterStream

#: A shard below this stays in host memory for good, as in stock DeepSpeed (MIN_AIO_BYTES).
SWAPPABLE_BYTES_MIN = 1 << 20
#: Bytes gathered in one turn. Fixed, so that every rank cuts the same list in the same places.
TURN_BYTES = 256 << 20
#: What available_swap_in_buffers answers: prefetch is limited in bytes, by the stream.
PREFETCH_COUNT_MAX = 64

Parameter = Any


class ParameterSwapper:
    """One per zero.Init context; every parameter of that context refers to it as `nvme_swapper`."""

    def __init__(
        self,
        *,
        attachment: Attachment,
        stream: ParameterStream,
        dtype: torch.dtype,
        swappable_bytes_min: int = SWAPPABLE_BYTES_MIN,
    ) -> None:
        """Takes no memory yet.

        Args:
            attachment: What the model works with.
            stream: The path underneath. With a budget it takes shards of any size.
            dtype: Of the model, for the bytes of shards that do not exist yet.
            swappable_bytes_min: Without a budget: smaller shards stay in host memory.
        """
        self.memascend_attachment = attachment
        self.dtype = dtype
        self._stream = stream
        budget = stream.budget
        self._swappable_bytes_min = swappable_bytes_min if budget is None else 1
        self._by_key: dict[str, Parameter] = {}
        # Gathered over a collective that may still read the slot; let go when it has been waited
        # for.
        self._gathering: dict[str, Parameter] = {}
        # Same stand-in as stock: 0-dim, so that a use of absent data fails loudly.
        self.invalid_buffer = torch.tensor(1).half()
        # Of each dtype: DeepSpeed asks an absent shard for it when a collective is over.
        self._invalid: dict[torch.dtype, torch.Tensor] = {}

    def adopt_budget(self, budget: Budget | None) -> None:
        """Takes another budget; nothing may be staged."""
        self._stream.budget = budget

    @property
    def _turn_bytes_max(self) -> int:
        budget = self._stream.budget
        return TURN_BYTES if budget is None else min(TURN_BYTES, budget.share_bytes)

    # -- surface of the stock swapper ------------------------------------------------------------

    def swappable_tensor(self, param: Parameter = None, numel: int | None = None) -> bool:
        """Whether a shard lives on the drive; exactly one of the arguments is given."""
        if (param is None) == (numel is None):
            raise ValueError("swappable_tensor takes either param or numel")
        count = param.ds_tensor.ds_numel if numel is None else numel
        return bool(count * self.dtype.itemsize >= self._swappable_bytes_min)

    def available_swap_in_buffers(self) -> int:
        """How many further parameters DeepSpeed may ask to prefetch."""
        return PREFETCH_COUNT_MAX

    def get_buffer(self, param: Parameter, numel: int) -> torch.Tensor:
        """Memory for the first partitioning of a parameter; the caller fills and stores it."""
        self._stream.drop(self.key(param))
        return self._stage_outgoing(param, numel)

    def swap_out_and_release(
        self,
        params: Sequence[Parameter],
        async_op: bool = False,
        force_buffer_release: bool = False,
    ) -> None:
        """Stores shards and gives their slots back; on return the bytes are in the store."""
        for param in params:
            key = self.key(param)
            try:
                if self._stream.is_staged(key):
                    self._stream.write(key)
                else:
                    self._stream.write_from(key, self._device_shard(param))
            finally:
                self._mark_absent(param)

    def swap_in(
        self,
        params: Sequence[Parameter],
        async_op: bool = True,
        swap_in_buffers: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Reads shards: all of them, or with `async_op` as many as may be read ahead.

        A list may hold a parameter twice (a prefetch window spans forward and backward use), one
        that is gathered already or one that is on its way. What is needed now is there on return;
        what else is read ahead stays on its way.
        """
        if swap_in_buffers is not None:
            raise NotImplementedError(
                "swap_in with the caller's buffers is not part of DeepSpeed 0.19"
            )
        self._let_go_gathered()
        wanted = {self.key(param): param for param in params if self._is_absent(param)}
        sizes = [(key, self._nbytes(param)) for key, param in wanted.items()]
        needed: set[str] = set()
        if async_op:
            wanted = {key: wanted[key] for key in self._stream.admit_prefetch(sizes)}
        else:
            needed = {self.key(param) for param in params if self._lives_on_drive(param)}
            self._stream.claim(needed)
            self._make_room(nbytes for _, nbytes in sizes)
        for key, param in wanted.items():
            self._stream.read(key, param.ds_tensor.ds_numel, param.dtype, ahead=async_op)
            param.ds_tensor.status = PartitionedParamStatus.INFLIGHT
        if needed:
            self._complete(needed)

    def synchronize_reads(self) -> None:
        """Waits for every read in flight and makes the shards available."""
        self._complete(None)

    def _complete(self, keys: set[str] | None) -> None:
        try:
            arrived = self._stream.wait_reads(keys)
        except BaseException:
            for param in self._by_key.values():
                if param.ds_tensor.status is PartitionedParamStatus.INFLIGHT:
                    self._mark_absent(param)
                    with suppress(Exception):  # the first error is the one to raise
                        self._stream.drop(self.key(param))
            raise
        for key in arrived:
            param = self._by_key[key]
            param.ds_tensor.data = self._stream.staged_tensor(key).data
            param.ds_tensor.status = PartitionedParamStatus.AVAILABLE

    def synchronize_writes(self) -> None:
        """Waits for every write in flight; the first error is raised."""
        self._stream.wait_writes()

    def remove_partition_and_release_buffers(self, params: Iterable[Parameter]) -> None:
        """Lets shards go without writing; the store already holds the truth. Idempotent."""
        for param in params:
            if not self._is_being_gathered(param):
                self._let_go(param)

    def swap_into_buffer(self, param: Parameter, dest_buffer: torch.Tensor) -> None:
        """Reads a shard into memory that is not ours; any alignment, any device."""
        self._stream.read_into(self.key(param), dest_buffer.narrow(0, 0, param.ds_tensor.ds_numel))

    def reserve_partitioned_swap_space(self, partition_num_elems: Sequence[int]) -> None:
        """Nothing to reserve: updated shards are written from pool slots."""

    def swap_out_partitioned_params(
        self, dst_fp16_params: Sequence[Parameter], src_fp32_params: Sequence[torch.Tensor]
    ) -> None:
        """Casts updated fp32 shards to the parameters' dtype and stores them.

        The sources may be reused on return. Writes may still be in flight: a later read of the same
        parameter sees them, and synchronize_writes at the end of the step reports their errors.
        """
        for param, source in zip(dst_fp16_params, src_fp32_params, strict=True):
            key = self.key(param)
            self._stream.drop(key)
            self._make_room([self._nbytes(param)])
            self._stream.write_cast(key, source, param.dtype)
            self._mark_absent(param)

    # -- what our gather and step hooks call -----------------------------------------------------

    def turns(self, params: Iterable[Parameter]) -> Iterator[list[Parameter]]:
        """Cuts parameters into turns that hold a limited number of bytes, one parameter at least.

        The limit is TURN_BYTES, or the share of the budget where that is less.

        In the order of their ids: DeepSpeed hands over sets, whose order differs from rank to rank,
        and every rank must cut in the same places.
        """
        turn: list[Parameter] = []
        turn_bytes = 0
        for param in sorted(params, key=lambda param: param.ds_id):
            nbytes = self._nbytes(param) if self._lives_on_drive(param) else 0
            if self._stream.budget is not None:
                nbytes = max(nbytes, self._stream.budget.slot_bytes(nbytes))
            if turn and turn_bytes + nbytes > self._turn_bytes_max:
                yield turn
                turn, turn_bytes = [], 0
            turn.append(param)
            turn_bytes += nbytes
        if turn:
            yield turn

    def after_gather(self, params: Iterable[Parameter]) -> None:
        """Lets the slots of gathered parameters go, once nothing reads them any more.

        On a synchronous device a gather over one rank aliases the slot instead of copying it (stock
        then computes with memory that another parameter overwrites); the alias is replaced by a
        copy. An alias of a device tensor stays: nobody reuses that.
        """
        synchronous = get_accelerator().is_synchronized_device()
        event: Event | None = None
        for param in params:
            key = self.key(param)
            if not (self._lives_on_drive(param) and self._stream.is_staged(key)):
                continue
            if not synchronous:
                if event is None:
                    event = get_accelerator().Event()
                    event.record()
                self._let_go(param, event)
            elif _shares_memory(param.data, self._stream.staged_tensor(key)):
                if self._stream.is_in_slot(key):
                    param.data = param.data.clone()
                self._let_go(param)
            elif param.ds_status is ZeroParamStatus.INFLIGHT:
                self._gathering[key] = param
            else:
                self._let_go(param)

    def stage_for_update(self, param: Parameter) -> None:
        """Gives a gathered parameter's shard memory, so that modified data can be partitioned."""
        if not self._stream.is_staged(self.key(param)):
            param.ds_tensor.data = self._stage_outgoing(param, param.ds_tensor.ds_numel).data
            param.ds_tensor.status = PartitionedParamStatus.AVAILABLE

    def drop_unused(self) -> None:
        """Lets every host copy go before a step changes the parameters.

        A shard that was read ahead and not used, or kept after its use, would otherwise outlive its
        update.
        """
        self._let_go_gathered()
        for key in self._stream.staged_keys():
            self._let_go(self._by_key[key])
        self._stream.forget_all()

    def key(self, param: Parameter) -> str:
        """The store's name for a parameter's shard."""
        key = f"param.{param.ds_id}"
        self._by_key.setdefault(key, param)
        return key

    # -- inner -----------------------------------------------------------------------------------

    def _make_room(self, sizes: Iterable[int]) -> None:
        for key in self._stream.make_room(sizes):
            self._mark_absent(self._by_key[key])

    def _stage_outgoing(self, param: Parameter, numel: int) -> torch.Tensor:
        """Where DeepSpeed copies the rank's slice of a whole parameter before it is stored."""
        self._make_room([numel * param.dtype.itemsize])
        slot = self._stream.stage(self.key(param), numel, param.dtype)
        return _slice_of_rank(param, numel) if slot is None else slot

    @staticmethod
    def _device_shard(param: Parameter) -> torch.Tensor:
        shard: torch.Tensor = param.ds_tensor.data
        if shard.numel() != param.ds_tensor.ds_numel:
            raise AssertionError(f"parameter {param.ds_id} has no shard to store: it was let go")
        return shard

    @staticmethod
    def _nbytes(param: Parameter) -> int:
        return int(param.ds_tensor.ds_numel * param.dtype.itemsize)

    @staticmethod
    def _lives_on_drive(param: Parameter) -> bool:
        return param.ds_tensor is not None and param.ds_tensor.final_location == "nvme"

    @staticmethod
    def _is_absent(param: Parameter) -> bool:
        return (
            param.ds_tensor.status is PartitionedParamStatus.NOT_AVAILABLE
            and param.ds_status is ZeroParamStatus.NOT_AVAILABLE
        )

    def _is_being_gathered(self, param: Parameter) -> bool:
        in_collective = self.key(param) in self._gathering
        return in_collective and param.ds_status is ZeroParamStatus.INFLIGHT

    def _let_go_gathered(self) -> None:
        for param in list(self._gathering.values()):
            if not self._is_being_gathered(param):
                self._let_go(param)

    def _let_go(self, param: Parameter, event: Event | None = None) -> None:
        key = self.key(param)
        self._gathering.pop(key, None)
        try:
            self._stream.drop(key, event)
        finally:
            self._mark_absent(param)

    def _mark_absent(self, param: Parameter) -> None:
        invalid = self._invalid.get(param.dtype)
        if invalid is None:
            invalid = self._invalid[param.dtype] = self.invalid_buffer.to(param.dtype)
        param.ds_tensor.data = invalid.data
        param.ds_tensor.status = PartitionedParamStatus.NOT_AVAILABLE


def _shares_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()


def _slice_of_rank(param: Parameter, numel: int) -> torch.Tensor:
    """The rank's slice of a whole parameter itself, where it is complete, else as much new memory.

    DeepSpeed then copies the slice onto itself and lets the parameter go; the slice keeps its
    memory until it is stored.
    """
    whole: torch.Tensor = param.data
    begin = numel * param.ds_zero_partition_rank
    if whole.is_contiguous() and begin + numel <= whole.numel():
        return whole.view(-1).narrow(0, begin, numel)
    return whole.new_empty(numel)
