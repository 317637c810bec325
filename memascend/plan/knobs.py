"""The knobs: sizes with a default and a minimum, and how they shrink under a limit.

Pure arithmetic for one rank. Every component is a multiple of the page and grows with its knob, so
the sum of the minimums is exactly the smallest limit that works.

The defaults keep the queues of `PlanRequest.drive_count` drives as deep as that of one: there are
more tiles and staging slots, and more is read ahead. Under a limit they are those of as many drives
as fit. If not even those of one drive do, read-ahead shrinks first: it saves at most the passes'
share of the drive time. Tiles and staging slots shrink next, but not below their knees, where the
host's work per tile or slot outweighs the drive's. Then the slots of a layer shrink; shards without
a slot move in chunks. Finally tiles and staging slots shrink below their knees.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memascend.base.components import (
    ACTIVATION_SLOTS,
    BOUNCE_BUFFERS,
    CHECKSUMS,
    OPTIMIZER_SCRATCH,
    OPTIMIZER_TILES,
    PARAMETER_SLOTS,
    STAGING_SLOTS,
)
from memascend.base.sizes import (
    BOUNCE_BYTES,
    PREFETCH_BYTES_MIN,
    REPEATED_COUNT_MIN,
    STAGING_SLOT_BYTES,
    STAGING_SLOT_COUNT,
    casts,
)
from memascend.base.units import KIB, MIB, PAGE_BYTES, format_nbytes, page_down, page_up
from memascend.errors import ConfigError
from memascend.memory.pool import SLOT_PARTS
from memascend.plan.checksums import checksum_bytes
from memascend.plan.muon import matrix_names
from memascend.plan.request import PlanRequest
from memascend.plan.shapes import ModelShapes, TensorShape

STAGING_SLOT_COUNT_MIN, STAGING_SLOT_BYTES_MIN = 2, 256 * KIB
TILE_NUMEL, TILE_NUMEL_MIN = 1 << 20, 16 << 10
TILE_NUMEL_STEP = PAGE_BYTES  # elements: keeps every block of a tile a multiple of the page
TILE_COUNT = 3  # one is read, one computed, one written
#: For each further drive: one more is read, and one more written.
TILES_PER_DRIVE = TILE_COUNT - 1
#: If the step begins during backward, gradients of this many tiles wait in memory: some for a
#: neighbour in another layer, or in another sub-group, one that arrives, and those being read.
#: There is one more for each tile of a further drive.
SPARE_COUNT = 8
GRADIENT_FP32_BYTES = 4
#: Below these the host's work per tile or slot outweighs the drive's: `bench_step.py --vary tile`.
TILE_NUMEL_KNEE, STAGING_SLOT_BYTES_KNEE = 256 << 10, MIB
#: Host time for a tile, as a multiple of that for a chunk of a gradient.
TILE_TO_CHUNK_COST = 5
PARAMETER_SLOTS_BYTES_MIN = 4 * MIB
#: With fewer elements on a rank, default tiles and read-ahead shrink in proportion, but not below
#: the knee and two layers; staging slots are no larger than the tensors that pass through them.
SMALL_NUMEL = 64 << 20
#: Larger shards (fused experts) move in chunks by default: slots for two would exceed all the rest.
SLOT_BYTES_MAX = 512 * MIB


class LimitTooSmallError(ConfigError):
    """The host memory limit is below the sum of the smallest knobs.

    Attributes:
        limit_bytes: The limit.
        minimum_bytes: The smallest limit that works.
        needed: Bytes of each component at the minimum.
    """

    def __init__(
        self, message: str, *, limit_bytes: int, minimum_bytes: int, needed: Mapping[str, int]
    ) -> None:
        super().__init__(message)
        self.limit_bytes = limit_bytes
        self.minimum_bytes = minimum_bytes
        self.needed = needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """The sizes that the plan chooses."""

    prefetch_bytes: int  # bytes of parameter slots for read-ahead
    tile_numel: int  # elements of a tile, 0 without tiles
    tile_count: int  # tiles in flight
    staging_slot_count: int
    staging_slot_bytes: int
    layer_bytes: int  # bytes of parameter slots for a layer in use, and for write-back
    slot_bytes: int  # bytes of the largest shard that takes a slot, if the budget permits
    drive_count: int  # drives whose queues these sizes keep full
    checksum_bytes: int = 0  # bytes of checksums for everything that may be on the drives

    def host(self, request: PlanRequest) -> dict[str, int]:
        """Return the bytes of each component except the cache."""
        checksums = {CHECKSUMS: self.checksum_bytes} if self.checksum_bytes else {}
        return {
            BOUNCE_BUFFERS: BOUNCE_BYTES,
            **dict.fromkeys(slot_sets(request), self.staging_slot_count * self.staging_slot_bytes),
            OPTIMIZER_TILES: self._tiles_bytes(request),
            OPTIMIZER_SCRATCH: self.tile_numel * scratch_element_bytes(request),
            PARAMETER_SLOTS: self.layer_bytes + self.prefetch_bytes,
            **checksums,
        }

    def _tiles_bytes(self, request: PlanRequest) -> int:
        nbytes = math.ceil(self.tile_numel * tiles_element_bytes(request, self.tile_count))
        # Each tile has whole pages of scales.
        scales_bytes = math.ceil(self.tile_numel * (request.states_bytes % 1))
        return nbytes + self.tile_count * (page_up(scales_bytes) - scales_bytes)

    def host_bytes(self, request: PlanRequest) -> int:
        """Return the bytes of these components together."""
        return sum(self.host(request).values())

    @property
    def slot_bytes_max(self) -> int:
        """Bytes of the largest shard that takes a slot; larger ones move in chunks."""
        budget_bytes = self.layer_bytes + self.prefetch_bytes
        return min(self.slot_bytes, page_down(budget_bytes // SLOT_PARTS))


def slot_sets(request: PlanRequest) -> tuple[str, ...]:
    """Return the components that are sets of slots of the same size and number."""
    return (STAGING_SLOTS, ACTIVATION_SLOTS) if request.has_activations else (STAGING_SLOTS,)


def tiles_element_bytes(request: PlanRequest, tile_count: int) -> float:
    """Return host bytes of all tiles and spare blocks, per element of a tile.

    A tile has weight, states, gradient and 16-bit result; a spare block a gradient.
    """
    is_cast = casts(request.precision, request.master_dtype)
    values: float = request.master_itemsize + request.states_bytes
    values += request.param_itemsize if is_cast else 0
    gradients = tile_count + spare_count(request, tile_count)
    return tile_count * values + gradients * request.gradient_itemsize


def spare_count(request: PlanRequest, tile_count: int) -> int:
    """Return the number of spare blocks, for gradients that wait for one of the tiles."""
    return SPARE_COUNT + max(0, tile_count - TILE_COUNT) if request.may_begin_early else 0


def scratch_element_bytes(request: PlanRequest) -> int:
    """Return host bytes per element of the block that gradients are cast into; 0 without one."""
    is_cast = casts(request.gradient_dtype, request.master_dtype)
    return request.master_itemsize if is_cast else 0


def choose_knobs(shapes: ModelShapes, request: PlanRequest, limit_bytes: int | None) -> Knobs:
    """Return the defaults, or the largest that fit; raise LimitTooSmallError if none do."""
    for drives in range(request.drive_count, 0, -1):
        knobs = _defaults(shapes, request, drives)
        if limit_bytes is None or knobs.host_bytes(request) <= limit_bytes:
            return knobs
    assert limit_bytes is not None  # and these are the defaults of one drive
    shrink_to_knees = functools.partial(_shrink_moving, _KNEES)
    shrink_to_minimums = functools.partial(_shrink_moving, _MINIMUMS)
    for shrink in (_shrink_prefetch, shrink_to_knees, _shrink_layer, shrink_to_minimums):
        excess_bytes = knobs.host_bytes(request) - limit_bytes
        if excess_bytes > 0:
            knobs = shrink(knobs, request, excess_bytes)
    if knobs.host_bytes(request) > limit_bytes:
        raise _too_small(knobs, request, limit_bytes, shapes.name)
    return knobs


# -- defaults --------------------------------------------------------------------------------------


def _defaults(shapes: ModelShapes, request: PlanRequest, drives: int) -> Knobs:
    layer_bytes, prefetch_bytes, slot_bytes = _parameter_slots(shapes, request, drives)
    staging_slot_bytes, staging_slot_count = _staging_slots(shapes, request, drives)
    tile_numel, tile_count = 0, 0
    if request.optimizer_device == "nvme":
        tile_numel, tile_count = tile_sizes(
            max(sub_group_numels(shapes, request), default=0),
            sum(tensor.shard_numel(request.world) for tensor in shapes.trainable),
            is_tiled=request.is_tiled,
            tile_bytes=request.tile_bytes,
            drives=drives,
        )
    return Knobs(
        prefetch_bytes=prefetch_bytes,
        tile_numel=tile_numel,
        tile_count=tile_count,
        staging_slot_count=staging_slot_count,
        staging_slot_bytes=staging_slot_bytes,
        layer_bytes=layer_bytes,
        slot_bytes=slot_bytes,
        drive_count=drives,
        checksum_bytes=checksum_bytes(shapes, request),
    )


def tile_sizes(
    largest_numel: int, numel: int, *, is_tiled: bool, tile_bytes: int | None, drives: int = 1
) -> tuple[int, int]:
    """Return (elements of a tile, number of tiles) without a limit.

    `largest_numel` counts the elements of this rank's largest sub-group, `numel` those of all.
    """
    largest_numel = _tile_step_up(largest_numel)
    if not is_tiled:
        return largest_numel, 1
    wanted = min(_in_proportion(TILE_NUMEL, TILE_NUMEL_KNEE, numel), -(-numel // TILE_COUNT))
    if tile_bytes is not None:
        steps = tile_bytes // GRADIENT_FP32_BYTES // TILE_NUMEL_STEP
        wanted = max(TILE_NUMEL_MIN, steps * TILE_NUMEL_STEP)
    tile_numel = min(_tile_step_up(wanted), largest_numel)
    existing = -(-numel // max(1, tile_numel))
    wanted_count = TILE_COUNT + (drives - 1) * TILES_PER_DRIVE
    return tile_numel, min(wanted_count, max(TILE_COUNT, existing))


def _staging_slots(shapes: ModelShapes, request: PlanRequest, drives: int) -> tuple[int, int]:
    """Return (bytes of a staging slot, number of slots).

    Slots of activations have the same size, and activations depend on tokens: then the full size.
    Slots do not shrink in proportion to the model: backward does not wait if all gradients of a
    small model fit, with one slot more.
    """
    count = drives * STAGING_SLOT_COUNT
    if request.has_activations:
        return STAGING_SLOT_BYTES, count
    widest = max(request.param_itemsize, request.gradient_itemsize)
    all_bytes = sum(tensor.shard_bytes(request.world, widest) for tensor in shapes.tensors)
    part_bytes = all_bytes // (STAGING_SLOT_COUNT - 1)
    slot_bytes = page_up(max(STAGING_SLOT_BYTES_MIN, min(STAGING_SLOT_BYTES, part_bytes)))
    return slot_bytes, min(count, max(STAGING_SLOT_COUNT, 1 - (-all_bytes // slot_bytes)))


def _numel(shapes: ModelShapes, request: PlanRequest) -> int:
    return sum(tensor.shard_numel(request.world) for tensor in shapes.tensors)


def _in_proportion(largest: int, knee: int, numel: int) -> int:
    return min(largest, max(knee, largest * numel // SMALL_NUMEL))


def sub_group_numels(shapes: ModelShapes, request: PlanRequest) -> Sequence[int]:
    """Return the elements of one rank's part of each sub-group, in DeepSpeed's order."""
    if request.sub_group_numels is not None:
        return request.sub_group_numels
    groups = shapes.sub_groups(
        world=request.world,
        sub_group_size=request.sub_group_size,
        has_decay_groups=request.has_decay_groups,
        matrices=matrix_names(shapes, request),
    )
    return [sum(tensor.shard_numel(request.world) for tensor in group) for group in groups]


def _parameter_slots(
    shapes: ModelShapes, request: PlanRequest, drives: int
) -> tuple[int, int, int]:
    """Return bytes of (a layer in use and write-back, read-ahead, the largest slot).

    The largest slot holds the largest shard that occurs repeatedly: one of the layers, not the
    embedding, which moves in chunks.
    """
    if request.parameters_device != "nvme":
        return 0, 0, 0

    def nbytes(tensor: TensorShape) -> int:
        return page_up(tensor.shard_bytes(request.world, request.param_itemsize))

    counts = Counter(nbytes(tensor) for tensor in shapes.tensors)
    fitting = {size: count for size, count in counts.items() if size <= SLOT_BYTES_MAX}
    repeated = [size for size, count in fitting.items() if count >= REPEATED_COUNT_MIN]
    slot_bytes = max(repeated or fitting, default=SLOT_BYTES_MAX)
    layers = ([nbytes(tensor) for tensor in layer] for layer in shapes.layers())
    in_use_bytes = max(sum(size for size in layer if size <= slot_bytes) for layer in layers)
    layer_bytes = max(PARAMETER_SLOTS_BYTES_MIN, in_use_bytes + slot_bytes)
    if request.prefetch_bytes is not None:
        return layer_bytes, page_up(request.prefetch_bytes), slot_bytes
    numel = _numel(shapes, request)
    least_bytes = _in_proportion(drives * PREFETCH_BYTES_MIN, 2 * in_use_bytes, numel)
    # Larger shards take no slot.
    all_bytes = sum(size * count for size, count in counts.items() if size <= slot_bytes)
    prefetch_bytes = min(max(page_up(least_bytes), 2 * slot_bytes), all_bytes)
    return layer_bytes, prefetch_bytes, slot_bytes


# -- shrinking: each gives the largest setting that saves enough, else the smallest ---------------


def _shrink_prefetch(knobs: Knobs, request: PlanRequest, excess_bytes: int) -> Knobs:
    if request.prefetch_bytes is not None:
        return knobs
    kept_bytes = max(0, page_down(knobs.prefetch_bytes - excess_bytes))
    return dataclasses.replace(knobs, prefetch_bytes=kept_bytes)


@dataclass(frozen=True, slots=True)
class _Least:
    """Lower bounds for tiles and staging slots."""

    tile_numel: int
    slot_bytes: int
    slot_count: int


_KNEES = _Least(TILE_NUMEL_KNEE, STAGING_SLOT_BYTES_KNEE, STAGING_SLOT_COUNT)
_MINIMUMS = _Least(TILE_NUMEL_MIN, STAGING_SLOT_BYTES_MIN, STAGING_SLOT_COUNT_MIN)


def _shrink_moving(least: _Least, knobs: Knobs, request: PlanRequest, excess_bytes: int) -> Knobs:
    """Shrink tiles and staging slots so that the host's work for both together is minimal.

    A step takes N / n tiles of n elements and N g / s chunks of s bytes, for N parameters whose
    gradients have g bytes. For a fixed sum of memory the total cost is minimal if each kind has
    memory in proportion to the square root of its cost times its price in bytes.
    """
    numel_bytes = tiles_element_bytes(request, knobs.tile_count) + scratch_element_bytes(request)
    sets = len(slot_sets(request))
    staging_bytes = sets * knobs.staging_slot_count * knobs.staging_slot_bytes
    room_bytes = knobs.tile_numel * numel_bytes + staging_bytes - excess_bytes
    if request.states_bytes % 1:  # pages of scales that are not full
        room_bytes -= knobs.tile_count * PAGE_BYTES
    if knobs.tile_numel and request.tile_bytes is None and request.is_tiled:
        tiles = math.sqrt(TILE_TO_CHUNK_COST * numel_bytes)
        staging = math.sqrt(sets * knobs.staging_slot_count * request.gradient_itemsize)
        wanted_bytes = int(room_bytes * staging / (tiles + staging))
        least_bytes = sets * least.slot_count * least.slot_bytes
        wanted_bytes = max(least_bytes, min(staging_bytes, wanted_bytes))
        kept = int((room_bytes - wanted_bytes) // numel_bytes)
        kept = kept // TILE_NUMEL_STEP * TILE_NUMEL_STEP
        kept = min(knobs.tile_numel, max(least.tile_numel, kept))
        knobs = dataclasses.replace(knobs, tile_numel=kept)
    kept_bytes = int(room_bytes - knobs.tile_numel * numel_bytes) // sets
    count = knobs.staging_slot_count
    slot_bytes = min(knobs.staging_slot_bytes, page_down(kept_bytes // count))
    if slot_bytes < least.slot_bytes:
        slot_bytes = min(knobs.staging_slot_bytes, least.slot_bytes)
        count = max(least.slot_count, min(count, kept_bytes // slot_bytes))
    return dataclasses.replace(knobs, staging_slot_count=count, staging_slot_bytes=slot_bytes)


def _shrink_layer(knobs: Knobs, request: PlanRequest, excess_bytes: int) -> Knobs:
    if request.parameters_device != "nvme":
        return knobs
    kept_bytes = max(PARAMETER_SLOTS_BYTES_MIN, page_down(knobs.layer_bytes - excess_bytes))
    return dataclasses.replace(knobs, layer_bytes=kept_bytes)


def _tile_step_up(numel: int) -> int:
    return -(-numel // TILE_NUMEL_STEP) * TILE_NUMEL_STEP


def _too_small(
    knobs: Knobs, request: PlanRequest, limit_bytes: int, model: str
) -> LimitTooSmallError:
    needed = knobs.host(request)
    minimum_bytes = sum(needed.values())
    width = max(map(len, needed))
    rows = [f"  {name:<{width}}  {format_nbytes(nbytes):>11}" for name, nbytes in needed.items()]
    tile_bytes = needed[OPTIMIZER_TILES] + needed[OPTIMIZER_SCRATCH]
    fixes = [f"set the limit to {minimum_bytes} bytes or more"]
    if not request.is_tiled and knobs.tile_numel:
        fixes.append(
            f"{request.optimizer} is not known to work element by element, so a whole sub-group of "
            f"{knobs.tile_numel} elements is held ({format_nbytes(tile_bytes)}): lower "
            "zero_optimization.sub_group_size, or use AdamW"
        )
    elif request.tile_bytes is not None:
        fixes.append(
            f"memascend.streaming.optimizer.tile_bytes={request.tile_bytes} costs "
            f"{format_nbytes(tile_bytes)}: lower it or leave it out"
        )
    if knobs.checksum_bytes:
        fixes.append(
            f"memascend.verify={request.verify!r} costs {format_nbytes(knobs.checksum_bytes)}: "
            "leave it out"
        )
    if request.prefetch_bytes:
        fixes.append(
            f"memascend.buffer_pool.prefetch_bytes={request.prefetch_bytes} costs "
            f"{format_nbytes(knobs.prefetch_bytes)}: lower it or leave it out"
        )
    message = "\n".join(
        [
            f"the host memory limit of {limit_bytes} bytes ({format_nbytes(limit_bytes)}) is too "
            f"small for {model}: at least {minimum_bytes} bytes ({format_nbytes(minimum_bytes)}) "
            "are needed per rank, with everything at its smallest:",
            *rows,
            f"fix: {'; or '.join(fixes)}",
        ]
    )
    return LimitTooSmallError(
        message, limit_bytes=limit_bytes, minimum_bytes=minimum_bytes, needed=needed
    )
