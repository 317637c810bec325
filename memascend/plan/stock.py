"""The account of stock DeepSpeed 0.19.8, and of stock with the paper's four pieces.

This is the baseline for memascend: the host memory of ZeRO-Infinity on one rank, term by term, with
DeepSpeed's own rounding. Pure arithmetic; tests/integration/test_stock_ledger.py measures the terms
on a real run. Python, torch, the device's context and the page cache are not counted.

The paper's four pieces are: a parameter pool with the sizes of the tensors, pinned memory without
rounding, an engine without a file per tensor, an overflow check without temporaries.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

from memascend.base.sizes import REPEATED_COUNT_MIN
from memascend.base.streams import GRADIENTS, MASTER, PARAMETERS, STATE
from memascend.base.units import MIB, power_of_two_up
from memascend.config.deepspeed import DeepSpeedSettings
from memascend.plan.footprint import Footprint
from memascend.plan.muon import matrix_names
from memascend.plan.request import PlanRequest
from memascend.plan.shapes import ModelShapes, TensorShape

ALIGNED_BYTES = 1024  # AIO_ALIGNED_BYTES, per worker of one operation
SWAPPABLE_BYTES_MIN = MIB  # MIN_AIO_BYTES
GRADIENT_BYTES = 4  # gradients on the drive are fp32
LAYERS_IN_FLIGHT = 2

# The letters are those of tests/integration/test_stock_ledger.py.
POOL, CACHE, WRITE_BACK = "A parameter pool", "B 16-bit cache", "C write-back buffer"
BUFFERS, FLAT, SMALL = "D optimizer buffers", "E flat gradients", "F small parameters"
SMALL_GROUPS = "optimizer kept in memory"
FLAT_SOURCE, COPY = "E flat gradients, before pinning", "G fp32 copy of a sub-group"
FIRST_GRADIENTS, FIRST_STATE = "H first gradients", "I first optimizer state"
OVERFLOW = "J overflow check"


@dataclass(frozen=True, slots=True, kw_only=True)
class StockPlan(Footprint):
    """The account of stock DeepSpeed."""

    #: Values that were raised above the JSON's, because stock would not run with those.
    notes: tuple[str, ...] = ()

    @property
    def initialization_bytes(self) -> int:
        """Peak host memory during start: the flat gradients are allocated last, twice."""
        late = self.host_bytes + self.host_initialization.get(FLAT_SOURCE, 0)
        early = max(self.host_initialization.get(name, 0) for name in (COPY, FIRST_GRADIENTS))
        return max(late, self.host_bytes - self.host.get(FLAT, 0) + early)


def stock(
    shapes: ModelShapes,
    *,
    request: PlanRequest,
    settings: DeepSpeedSettings | None = None,
    rounds_pinned: bool = True,
) -> StockPlan:
    """Return the account of stock DeepSpeed.

    On CUDA torch rounds pinned memory up to a power of two; without an accelerator pinning has no
    effect.
    """
    return _StockAccount(shapes, request, settings, rounds_pinned=rounds_pinned).plan()


def four_pieces(
    shapes: ModelShapes, *, request: PlanRequest, settings: DeepSpeedSettings | None = None
) -> StockPlan:
    """Return the account of DeepSpeed with only the paper's four pieces."""
    return _StockAccount(shapes, request, settings, has_pieces=True).plan()


class _StockAccount:
    """One rank's tensors and sub-groups, and where stock stores each."""

    def __init__(
        self,
        shapes: ModelShapes,
        request: PlanRequest,
        settings: DeepSpeedSettings | None,
        *,
        has_pieces: bool = False,
        rounds_pinned: bool = True,
    ) -> None:
        settings = settings or DeepSpeedSettings()
        self._shapes = shapes
        self._request = request
        self._param = settings.zero_optimization.offload_param
        self._optimizer = settings.zero_optimization.offload_optimizer
        self._workers = max(1, settings.aio.intra_op_parallelism)
        self._has_pieces = has_pieces
        self._rounds_pinned = rounds_pinned and not has_pieces
        self._swappable_bytes_min = max(SWAPPABLE_BYTES_MIN, settings.aio.block_size)
        self._has_param_drive = request.parameters_device == "nvme"
        self._has_optimizer_drive = request.optimizer_device == "nvme"
        self._has_optimizer = request.optimizer_device != "none"
        self._groups = shapes.sub_groups(
            world=request.world,
            sub_group_size=request.sub_group_size,
            has_decay_groups=request.has_decay_groups,
            matrices=matrix_names(shapes, request),
        )
        self._group_numels = [self._numel(group) for group in self._groups]
        self._group_numel_max = max(self._group_numels, default=0)
        self._learning = sum(self._group_numels)
        self._cache_bytes: list[int] = []
        self._is_resident = self._fill_cache()
        self._resident_names = {
            tensor.name
            for group, is_resident in zip(self._groups, self._is_resident, strict=True)
            for tensor in group
            if is_resident
        }

    def plan(self) -> StockPlan:
        return StockPlan(
            host=self._host(),
            host_initialization=self._initialization(),
            host_step=self._step(),
            notes=self._notes(),
            **self._drive(),
        )

    # -- where tensors are stored ------------------------------------------------------------------

    def _fill_cache(self) -> list[bool]:
        """Divide max_in_cpu among the parameter groups; return which sub-groups fit in it whole."""
        if self._request.parameters_device == "none":
            return [False] * len(self._groups)
        is_resident = []
        seen_numel = 0
        kinds = itertools.groupby(
            zip(self._groups, self._group_numels, strict=True),
            key=lambda pair: self._request.has_decay_groups and len(pair[0][0].shape) <= 1,
        )
        for _, pairs in kinds:
            numels = [numel for _, numel in pairs]
            room_numel = sum(numels)
            if self._has_param_drive and seen_numel + room_numel > self._param.max_in_cpu:
                room_numel = max(0, self._param.max_in_cpu - seen_numel)
            seen_numel += sum(numels)
            self._cache_bytes.append(room_numel * self._request.param_itemsize)
            ends = itertools.accumulate(numels)
            is_resident += [end <= room_numel for end in ends]
        return is_resident

    def _nbytes(self, tensor: TensorShape) -> int:
        """Return the bytes of this rank's part of a parameter on the drive.

        Stock's swapper assumes the model's dtype for every parameter.
        """
        return tensor.shard_numel(self._request.world) * self._request.param_itemsize

    def _is_swappable(self, tensor: TensorShape) -> bool:
        return self._nbytes(tensor) >= self._swappable_bytes_min

    def _numel(self, tensors: list[TensorShape]) -> int:
        return sum(tensor.shard_numel(self._request.world) for tensor in tensors)

    def _swapped_group_numels(self) -> list[int]:
        """Return the elements of each sub-group whose optimizer state is on the drive.

        Small sub-groups stay in memory.
        """
        if not self._has_optimizer_drive:
            return []
        nbytes_min = self._swappable_bytes_min
        return [n for n in self._group_numels if n * self._request.master_itemsize >= nbytes_min]

    def _aligned(self, numel: int, itemsize: int) -> int:
        step = ALIGNED_BYTES * self._workers // itemsize
        return -(-numel // step) * step * itemsize

    def _pinned(self, nbytes: int, is_pinned: bool = True) -> int:
        is_rounded = self._rounds_pinned and is_pinned
        return power_of_two_up(nbytes) if is_rounded else nbytes

    # -- host --------------------------------------------------------------------------------------

    def _host(self) -> dict[str, int]:
        request = self._request
        small = [tensor for tensor in self._shapes.tensors if not self._is_swappable(tensor)]
        if not self._has_param_drive:
            small = []
        small_bytes = [
            tensor.shard_bytes(request.world, request.param_itemsize)
            for tensor in small
            if tensor.name not in self._resident_names
        ]
        flat_bytes = request.gradient_itemsize * self._learning if self._has_optimizer else 0
        buffer_bytes = self._aligned(self._group_numel_max, request.master_itemsize)
        is_pinned = self._optimizer.pin_memory
        return {
            POOL: self._pool_bytes(),
            CACHE: sum(self._pinned(nbytes) for nbytes in self._cache_bytes),
            WRITE_BACK: self._write_back_bytes(),
            BUFFERS: self._buffer_count() * buffer_bytes if self._has_optimizer_drive else 0,
            FLAT: self._pinned(flat_bytes, is_pinned),
            SMALL: sum(self._pinned(nbytes, self._param.pin_memory) for nbytes in small_bytes),
            SMALL_GROUPS: self._kept_optimizer_bytes(),
        }

    def _pool_bytes(self) -> int:
        if not self._has_param_drive:
            return 0
        if not self._has_pieces:
            numel = max(self._param.buffer_size, self._largest_swappable())
            return self._param.buffer_count * self._aligned(numel, self._request.param_itemsize)
        # Slots of the tensors' own sizes: two layers, and the embedding or the output head.
        counts = Counter(tensor.numel for tensor in self._shapes.tensors)
        layered = [n for n, count in counts.items() if count >= REPEATED_COUNT_MIN] or list(counts)
        layer_bytes = max(
            sum(self._nbytes(t) for t in layer if t.numel in layered and self._is_swappable(t))
            for layer in self._shapes.layers()
        )
        alone = [
            self._nbytes(tensor)
            for tensor in self._shapes.tensors
            if tensor.numel not in layered and self._is_swappable(tensor)
        ]
        return LAYERS_IN_FLIGHT * layer_bytes + max(alone, default=0)

    def _largest_swappable(self) -> int:
        swappable = (t for t in self._shapes.tensors if self._is_swappable(t))
        return max((t.shard_numel(self._request.world) for t in swappable), default=0)

    def _write_back_bytes(self) -> int:
        """Return the bytes of the write-back buffer.

        Stock sizes it by the whole tensors of the largest sub-group, not by their shards. A
        sub-group is cut by elements of one rank, so the buffer grows with the number of ranks.
        """
        if not self._has_param_drive or all(self._is_resident):
            return 0
        largest = self._groups[self._group_numels.index(self._group_numel_max)]
        return sum(self._aligned(tensor.numel, self._request.param_itemsize) for tensor in largest)

    def _buffer_count(self) -> int:
        """Return the number of buffers: at least weights, gradient and states, 3x if pipelined."""
        is_pipelined = self._optimizer.pipeline_read or self._optimizer.pipeline_write
        needed = (self._request.states + 2) * (3 if is_pipelined else 1)
        return max(self._optimizer.buffer_count, needed)

    def _kept_optimizer_bytes(self) -> int:
        """Return bytes of weights, states and gradients that are not on the drive."""
        if not self._has_optimizer:
            return 0
        itemsize = self._request.master_itemsize
        kept = Counter(self._group_numels) - Counter(self._swapped_group_numels())
        return sum(
            numel * itemsize * (1 + self._request.states)
            + self._pinned(numel * itemsize, self._optimizer.pin_memory)
            for numel in kept.elements()
        )

    # -- temporaries -------------------------------------------------------------------------------

    def _initialization(self) -> dict[str, int]:
        if not self._has_optimizer:
            return {}
        swapped = set(self._swapped_group_numels())
        copied = [
            numel
            for numel, is_resident in zip(self._group_numels, self._is_resident, strict=True)
            if numel in swapped and not is_resident and not self._optimizer.fast_init
        ]
        source_numel = self._learning if self._optimizer.pin_memory else 0
        return {
            FLAT_SOURCE: self._request.gradient_itemsize * source_numel,
            COPY: self._request.master_itemsize * max(copied, default=0),
            FIRST_GRADIENTS: self._request.master_itemsize * self._group_numel_max,
        }

    def _step(self) -> dict[str, int]:
        request = self._request
        swapped = max(self._swapped_group_numels(), default=0)
        found = {FIRST_STATE: request.master_itemsize * request.states * swapped}
        if request.precision == "fp16" and self._has_optimizer and not self._has_pieces:
            # isinf makes an absolute copy and a mask of one byte per element.
            found[OVERFLOW] = (request.gradient_itemsize + 1) * self._learning
        return found

    # -- drive -------------------------------------------------------------------------------------

    def _drive(self) -> dict[str, Any]:
        request = self._request
        itemsize, steps = request.param_itemsize, request.gradient_accumulation_steps
        on_drive = [
            t for t in self._shapes.tensors if self._has_param_drive and self._is_swappable(t)
        ]
        travelling = [t for t in on_drive if t.name not in self._resident_names]
        learning = [t for t in travelling if t.trainable]
        master = sum(
            self._aligned(n, request.master_itemsize) for n in self._swapped_group_numels()
        )
        gradients = self._gradient_bytes()
        travelling_bytes = self._numel(travelling) * itemsize
        read = {
            PARAMETERS: request.passes_bytes(travelling_bytes, self._shapes.numel) * steps,
            GRADIENTS: gradients,
            MASTER: master,
            STATE: self._states_bytes(),
        }
        stored = sum(self._aligned(t.shard_numel(request.world), itemsize) for t in on_drive)
        return {
            "drive": read | {PARAMETERS: stored},
            "read_bytes": read,
            "written_bytes": read | {PARAMETERS: self._numel(learning) * itemsize},
            "passes_read_bytes": read[PARAMETERS],
            "passes_written_bytes": gradients,
        }

    def _states_bytes(self) -> int:
        """Return bytes of states on the drive; a matrix of Muon has one."""
        itemsize, states = self._request.master_itemsize, self._request.states
        matrices = matrix_names(self._shapes, self._request)
        swapped = set(self._swapped_group_numels())
        return sum(
            self._aligned(numel, itemsize) * (1 if group[0].name in matrices else states)
            for group, numel in zip(self._groups, self._group_numels, strict=True)
            if numel in swapped
        )

    def _gradient_bytes(self) -> int:
        """Return bytes of fp32 gradients in a step; small gradients stay on the device."""
        swapped = set(self._swapped_group_numels())
        step = ALIGNED_BYTES * self._workers // GRADIENT_BYTES
        shards = (
            tensor.shard_numel(self._request.world) // step * step
            for group, numel in zip(self._groups, self._group_numels, strict=True)
            if numel in swapped
            for tensor in group
        )
        sizes = (numel * GRADIENT_BYTES for numel in shards)
        return sum(nbytes for nbytes in sizes if nbytes >= self._swappable_bytes_min)

    def _notes(self) -> tuple[str, ...]:
        notes = []
        largest, stated = self._largest_swappable(), self._param.buffer_size
        if self._has_param_drive and largest > stated and not self._has_pieces:
            notes.append(
                f"offload_param.buffer_size raised from {stated} to {largest}, the largest tensor: "
                "stock does not start below"
            )
        count = self._optimizer.buffer_count
        if self._has_optimizer_drive and self._buffer_count() > count:
            notes.append(
                f"offload_optimizer.buffer_count raised from {count} to {self._buffer_count()}: "
                "stock does not step with fewer"
            )
        return tuple(notes)
