"""The costs of verification: host memory of checksums, and drive bytes of keys in whole grains.

Pure arithmetic for one rank. Both are upper bounds, with an empty resident cache: keys that become
resident later have been on the drive before.
"""

from __future__ import annotations

import math
from dataclasses import replace

from memascend.base.sizes import ACTIVATIONS_BYTES
from memascend.base.units import PAGE_BYTES
from memascend.plan.muon import matrix_names
from memascend.plan.request import PlanRequest
from memascend.plan.shapes import ModelShapes, TensorShape

# As csrc/nvme/space/checksums.hpp keeps them.
#: Bytes that one checksum covers; with verification the unit of every transfer.
GRAIN_BYTES = 64 << 10
CHECKSUM_BYTES = 4
#: Bytes of a volume whose checksums fill one page.
PAGE_SPAN_BYTES = PAGE_BYTES // CHECKSUM_BYTES * GRAIN_BYTES
#: Memory for checksums is taken in multiples of this.
SLAB_BYTES = 64 << 10
#: Extra pages per volume, for the borders between kinds of keys.
PAGES_BESIDE = 2
#: Keys of each tensor that are on the drive at times only: gradients that a program sets by hand,
#: and the exact high halves of master weights.
GRADIENTS_SET = 1
HIGH_HALVES = 1


def checksum_bytes(shapes: ModelShapes, request: PlanRequest) -> int:
    """Return the host bytes of checksums for everything that may be on drives; 0 without any."""
    if request.verify == "off":
        return 0
    _, rounded = _key_bytes(shapes, request, GRADIENTS_SET, HIGH_HALVES)
    rounded += ACTIVATIONS_BYTES * request.has_activations
    pages = -(-rounded // PAGE_SPAN_BYTES) + PAGES_BESIDE * request.volume_count
    return -(-pages * PAGE_BYTES // SLAB_BYTES) * SLAB_BYTES


def rounding_bytes(shapes: ModelShapes, request: PlanRequest) -> int:
    """Return the most drive bytes that rounding all keys up to whole grains adds."""
    if request.verify == "off":
        return 0
    exact, rounded = _key_bytes(shapes, replace(request, tries_during_backward=False), 0, 0)
    return rounded - exact


def _key_bytes(
    shapes: ModelShapes, request: PlanRequest, gradients_set: int, high_halves: int
) -> tuple[int, int]:
    """Return the bytes of all keys together: exact, and in whole grains."""
    sizes: list[tuple[int, int]] = []  # (bytes, number of such keys)
    world = request.world
    matrices = matrix_names(shapes, request)

    def values_of(tensor: TensorShape) -> int:
        is_applied = request.applies_updates and tensor.name in matrices
        return 2 if request.may_begin_early or is_applied else 1

    if request.parameters_device == "nvme":
        itemsize = request.param_itemsize
        sizes += [(tensor.shard_bytes(world, itemsize), 1) for tensor in shapes.tensors]
        sizes += [
            (tensor.shard_bytes(world, itemsize), values_of(tensor) - 1)
            for tensor in shapes.trainable
        ]
    if request.optimizer_device == "nvme":
        window = request.window
        for tensor in shapes.trainable:
            numel, values = tensor.shard_numel(world), values_of(tensor)
            is_matrix = request.is_tiled and tensor.name in matrices  # its update is set
            sets = 1 if is_matrix else gradients_set
            sizes.append((numel * window.sum_itemsize, window.sums + sets))
            sizes.append((numel * window.arriving_itemsize, window.places))
            # Keys of sub-groups: at most one sub-group per tensor.
            sizes.append((numel * request.stored_master_itemsize, values))
            if request.splits_master:
                sizes.append((numel * request.param_itemsize, high_halves))
            if is_matrix:
                momentum, scales = divmod(request.momentum_itemsize, 1)
                kinds = (momentum, scales, request.flag_itemsize)
                sizes += [(math.ceil(numel * itemsize), values) for itemsize in kinds]
            else:
                sizes += [(nbytes, values) for nbytes in request.states_keys(numel)]
    exact = sum(nbytes * count for nbytes, count in sizes)
    return exact, sum(-(-nbytes // GRAIN_BYTES) * GRAIN_BYTES * count for nbytes, count in sizes)
