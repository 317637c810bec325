"""The plan: host bytes, drive bytes and traffic per step, computed before anything is allocated.

Pure arithmetic over shapes and a request, for one rank. The runtime is built from the same `Plan`:
it reserves the sizes of the knobs, and accounts for memory under the names of the components.

With a limit, the largest sizes that fit are chosen; knobs.py defines the order of shrinking.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from memascend.base.components import CHECKSUMS, PARAMETER_SLOTS, PARAMETERS_IN_CPU, RESIDENT_CACHE
from memascend.base.sizes import (
    BOUNCE_BYTES,
    GRADIENT_ROOM_BYTES_MAX,
    LEFT_ONE_OF,
    REPEATED_COUNT_MIN,
)
from memascend.base.streams import GRADIENTS, MASTER, PARAMETERS, STATE
from memascend.base.units import page_down, page_up
from memascend.errors import ConfigError
from memascend.plan.checksums import rounding_bytes
from memascend.plan.footprint import Footprint
from memascend.plan.knobs import (
    Knobs,
    LimitTooSmallError,
    choose_knobs,
    spare_count,
    sub_group_numels,
)
from memascend.plan.muon import applied_numel, matrices_numel, on_drive_numels
from memascend.plan.request import PlanRequest
from memascend.plan.shapes import ModelShapes

__all__ = ["LimitTooSmallError", "Plan", "PlanRequest", "default_limit", "derive"]

#: Without a stated limit, take at most this share of the free memory.
DEFAULT_SHARE = 0.5
#: Largest part that steps during backward may add to the bytes that a step writes, where nobody
#: demands them: second values of resident parameters go to the drive.
WRITTEN_MORE_MAX = 1 / 20
#: On the drive with verification: the most bytes that rounding keys up adds.
ROUNDING = "rounding up to whole grains"
#: On the drive if Muon's updates are applied as they are made: the same of matrices.
SECOND_MATRICES = "second values of matrices"
#: On the drive if the step begins during backward: a second copy of the values that it changes.
SECOND_VALUES = "second values"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Footprint):
    """The knobs and bytes that one rank will reserve and move.

    `host_initialization` and `host_step` are empty: memascend takes no temporary host memory.
    """

    model: str  # name of the model, for messages
    request: PlanRequest  # the request that it was derived from
    limit_bytes: int | None  # the limit it was derived under, None without one
    bounce_bytes: int  # size of the block for unaligned heads and tails
    staging_slot_count: int  # slots that gradients and large parameters pass through
    staging_slot_bytes: int  # bytes of each
    tile_numel: int  # elements of one tile, 0 when the optimizer is not on the drive
    tile_count: int  # tiles in flight
    drive_count: int  # drives whose queues these sizes keep full; a limit may allow few
    is_tiled: bool  # False when a tile is a whole sub-group because the optimizer requires it
    parameter_slots_bytes: int  # budget of all parameter slots, read-ahead included
    prefetch_bytes: int  # the part of that budget that read-ahead may fill
    slot_bytes_max: int  # larger shards pass through the staging slots in chunks
    backward_parameters_bytes: int  # bytes of parameters that a backward pass reads
    #: Bytes that forward need not read if it waits for the step behind it; of `read_bytes`.
    handed_over_bytes: int
    halves_read_bytes: int  # bytes of parameters that the step reads, as halves of master weights
    gradient_room_bytes: int  # device bytes of gradients that wait for the drive
    #: Part of the gradients that backward waits for: those of a layer that exceed all room.
    held_up: float
    early_numel: int  # elements of the sub-groups that may be stepped during backward
    updates_bytes: int  # bytes of Muon's updates, which the step writes, and reads again
    matrices_numel: int  # elements that Muon updates, matrix by matrix
    resident: Mapping[str, int] = field(default_factory=dict)  # bytes in memory, by stream
    #: Host memory that torch or DeepSpeed take in addition, as far as the request shows.
    not_ours: Mapping[str, int] = field(default_factory=dict)

    @property
    def trained_numel(self) -> int:
        """Elements whose master weights are on the drive or resident."""
        master_bytes = self.drive[MASTER] + self.resident.get(MASTER, 0)
        return master_bytes // self.request.stored_master_itemsize

    @property
    def checksum_bytes(self) -> int:
        """Host bytes of the checksums; 0 without verification."""
        return self.host.get(CHECKSUMS, 0)

    @property
    def spare_count(self) -> int:
        """Blocks beside the tiles, for gradients that arrive before their tile is read."""
        return spare_count(self.request, self.tile_count)

    @property
    def tile_bytes(self) -> int:
        """Bytes of the master weights of one tile."""
        return self.tile_numel * self.request.master_itemsize


def derive(shapes: ModelShapes, *, request: PlanRequest, limit_bytes: int | None = None) -> Plan:
    """Choose every knob and count every byte.

    `limit_bytes` is for the host memory of all components of one rank; None: the defaults, with no
    resident cache.

    Raises:
        LimitTooSmallError: The limit is below the sum of the smallest knobs.
        ConfigError: Neither parameters nor optimizer are on a drive.
    """
    if "nvme" not in (request.parameters_device, request.optimizer_device):
        raise ConfigError(
            f"nothing is on a drive: offload_param.device={request.parameters_device!r}, "
            f"offload_optimizer.device={request.optimizer_device!r}. Set one of them, or both, to "
            '"nvme"'
        )
    plan = _derive(shapes, request, limit_bytes)
    if plan.request.tries_during_backward and _writes_more(plan):
        plan = _derive(shapes, replace(request, tries_during_backward=False), limit_bytes)
    return plan


def _writes_more(plan: Plan) -> bool:
    """Return whether a step that begins during backward would write much more than one after it."""
    trained_bytes = plan.trained_numel * plan.request.param_itemsize
    more_bytes = min(plan.resident.get(PARAMETERS, 0), trained_bytes)
    return more_bytes > WRITTEN_MORE_MAX * sum(plan.written_bytes.values())


def _derive(shapes: ModelShapes, request: PlanRequest, limit_bytes: int | None) -> Plan:
    in_cpu_bytes = _in_cpu_bytes(shapes, request)
    rest_bytes = None if limit_bytes is None else max(0, limit_bytes - in_cpu_bytes)
    defaults = choose_knobs(shapes, request, None)
    if rest_bytes is not None and defaults.host_bytes(request) > rest_bytes:
        # Memory that steps after backward do not need shall not make a buffer smaller.
        request = replace(request, tries_during_backward=False)
    knobs = choose_knobs(shapes, request, rest_bytes)
    host = knobs.host(request)
    totals = _stream_bytes(shapes, request)
    resident: dict[str, int] = {}
    # If a knob had to shrink, less than one step of a knob is left: no cache.
    if rest_bytes is not None and knobs == choose_knobs(shapes, request, None):
        room_bytes = page_down(rest_bytes - sum(host.values()))
        choices = [_resident(totals, order, room_bytes) for order in _orders(request)]
        resident = min(choices, key=lambda one: _moved(shapes, request, totals, one, knobs))
    host[RESIDENT_CACHE] = sum(page_up(nbytes) for nbytes in resident.values())
    if in_cpu_bytes:
        host[PARAMETERS_IN_CPU] = in_cpu_bytes
    return Plan(
        model=shapes.name,
        request=request,
        limit_bytes=limit_bytes,
        bounce_bytes=BOUNCE_BYTES,
        staging_slot_count=knobs.staging_slot_count,
        staging_slot_bytes=knobs.staging_slot_bytes,
        tile_numel=knobs.tile_numel,
        tile_count=knobs.tile_count,
        drive_count=knobs.drive_count,
        is_tiled=request.is_tiled,
        parameter_slots_bytes=host[PARAMETER_SLOTS],
        prefetch_bytes=knobs.prefetch_bytes,
        slot_bytes_max=knobs.slot_bytes_max,
        **_room(shapes, request, knobs),
        resident=resident,
        not_ours=_not_ours(shapes, request, knobs),
        host=host,
        matrices_numel=matrices_numel(shapes, request),
        **_traffic(shapes, request, totals, resident, knobs),
    )


def begun_early(shapes: ModelShapes, plan: Plan) -> Plan:
    """Return the plan of a step that begins during backward and that nothing changes after it.

    `plan` is that of a run that finds out whether such steps pay; the memory is the same.
    """
    request = replace(plan.request, during_backward=True, tries_during_backward=False, guesses=True)
    in_cpu_bytes = plan.host.get(PARAMETERS_IN_CPU, 0)
    rest_bytes = None if plan.limit_bytes is None else max(0, plan.limit_bytes - in_cpu_bytes)
    knobs = choose_knobs(shapes, request, rest_bytes)
    totals = _stream_bytes(shapes, request)
    traffic = _traffic(shapes, request, totals, plan.resident, knobs)
    return replace(plan, request=request, **_room(shapes, request, knobs), **traffic)


def default_limit(plan_default_bytes: int, *, available: int) -> int:
    """Return the limit in bytes for a configuration without `host_memory_limit`.

    It is the size of the default plan (no resident cache), but at most half of the available
    memory: the other half is for Python, torch, data loading and the page cache.
    """
    return min(plan_default_bytes, int(available * DEFAULT_SHARE))


def _in_cpu_bytes(shapes: ModelShapes, request: PlanRequest) -> int:
    """Return the bytes of DeepSpeed's buffer of parameters in host memory."""
    if request.parameters_device != "nvme" or request.optimizer_device != "nvme":
        return 0
    learning = sum(tensor.shard_numel(request.world) for tensor in shapes.trainable)
    return min(request.max_in_cpu, learning) * request.param_itemsize


def _shards_bytes(shapes: ModelShapes, request: PlanRequest) -> list[int]:
    """Return the bytes of one rank's part of each parameter."""
    return [one.shard_bytes(request.world, request.param_itemsize) for one in shapes.tensors]


def _stream_bytes(shapes: ModelShapes, request: PlanRequest) -> dict[str, int]:
    """Return the bytes of one rank's part of each stream, one copy of each; none is resident."""
    learning = sum(tensor.shard_numel(request.world) for tensor in shapes.trainable)
    has_parameters = request.parameters_device == "nvme"
    if request.optimizer_device != "nvme":
        learning = 0
    return {
        PARAMETERS: sum(_shards_bytes(shapes, request)) if has_parameters else 0,
        GRADIENTS: learning * request.gradient_itemsize,
        MASTER: learning * request.stored_master_itemsize,
        STATE: math.ceil(learning * request.states_bytes) - _saved_by_momentum(shapes, request),
    }


def _saved_by_momentum(shapes: ModelShapes, request: PlanRequest) -> int:
    """Return the bytes that Muon's momentum takes less than the states of other parameters.

    Flags of matrices count as states.
    """
    saved_itemsize = request.states_bytes - request.momentum_itemsize - request.flag_itemsize
    on_drive = request.optimizer_device == "nvme"
    return int(matrices_numel(shapes, request) * saved_itemsize) if on_drive else 0


def _orders(request: PlanRequest) -> list[tuple[str, ...]]:
    """Return the orders in which streams may get memory under a limit."""
    orders: list[tuple[str, ...]] = [(PARAMETERS, GRADIENTS, MASTER, STATE)]
    if request.gradient_accumulation_steps > 1:  # sums are read and written in each micro-step
        orders.insert(0, (GRADIENTS, PARAMETERS, MASTER, STATE))
    if request.during_backward:  # gradients of tiles that are stepped then never reach the drive
        orders.append((PARAMETERS, MASTER, STATE, GRADIENTS))
    return orders


def _resident(totals: Mapping[str, int], order: Sequence[str], room_bytes: int) -> dict[str, int]:
    """Divide memory among streams in this order."""
    resident = {}
    for stream in order:
        resident[stream] = min(totals[stream], room_bytes)
        room_bytes -= min(page_up(totals[stream]), room_bytes)
    return resident


def _moved(
    shapes: ModelShapes,
    request: PlanRequest,
    totals: Mapping[str, int],
    resident: Mapping[str, int],
    knobs: Knobs,
) -> int:
    """Return the bytes that a step reads and writes."""
    traffic = _traffic(shapes, request, totals, resident, knobs)
    moved: Sequence[Mapping[str, int]] = (traffic["read_bytes"], traffic["written_bytes"])
    return sum(sum(one.values()) for one in moved)


def _matrices_bytes(
    shapes: ModelShapes, request: PlanRequest, resident: Mapping[str, int]
) -> tuple[int, int, int]:
    """Return bytes of Muon's updates beside gradients, of second values, of parameters with these.

    Updates that are applied as they are made lie nowhere, and their matrices have second values.
    Those of steps during backward are SECOND_VALUES.
    """
    if request.optimizer_device != "nvme":
        return 0, 0, 0
    numels = _numels(request, resident)
    applied = applied_numel(shapes, request, numels)
    written = matrices_numel(shapes, request) - applied
    if request.during_backward:
        # Instead of gradients: those are counted.
        written = matrices_numel(shapes, request) - on_drive_numels(shapes, request, numels)[0]
        applied = 0
    weight_itemsize = request.param_itemsize + request.stored_master_itemsize
    second_itemsize = weight_itemsize + request.momentum_itemsize + request.flag_itemsize
    parameters_bytes = applied * request.param_itemsize
    return (
        written * request.gradient_itemsize,
        math.ceil(applied * second_itemsize),
        parameters_bytes,
    )


def _numels(request: PlanRequest, resident: Mapping[str, int]) -> dict[str, int]:
    """Return the elements in memory, by stream; as states Muon's momentum counts."""
    itemsizes = {
        PARAMETERS: request.param_itemsize,
        MASTER: request.stored_master_itemsize,
        STATE: request.momentum_itemsize,
    }
    return {
        stream: math.ceil(resident.get(stream, 0) / itemsize)
        for stream, itemsize in itemsizes.items()
    }


def _early_numel(shapes: ModelShapes, request: PlanRequest, resident: Mapping[str, int]) -> int:
    """Return the elements of sub-groups that may be stepped during backward.

    Such a sub-group has no master weight or state in memory, which the first sub-groups get; one
    of Muon's matrices no parameter, either.
    """
    if not request.during_backward:
        return 0
    if request.is_muon:
        return sum(on_drive_numels(shapes, request, _numels(request, resident)))
    kept_numel = max(
        resident.get(MASTER, 0) / request.stored_master_itemsize,
        resident.get(STATE, 0) / (request.states_bytes or 1),
    )
    begin, early_numel = 0, 0
    for numel in sub_group_numels(shapes, request):
        early_numel += numel if begin >= kept_numel else 0
        begin += numel
    return early_numel


def _traffic(
    shapes: ModelShapes,
    request: PlanRequest,
    totals: Mapping[str, int],
    resident: Mapping[str, int],
    knobs: Knobs,
) -> dict[str, Any]:
    """Return the bytes on the drive, and the traffic of one optimizer step, as Plan's fields."""
    steps, window = request.gradient_accumulation_steps, request.window
    drive = {stream: nbytes - resident.get(stream, 0) for stream, nbytes in totals.items()}
    # Frozen parameters are read like the others and never written.
    learning = sum(tensor.shard_numel(request.world) for tensor in shapes.trainable)
    written_parameters = min(drive[PARAMETERS], learning * request.param_itemsize)
    # With sums in memory, each new sum displaces the previous one to the drive.
    given_way_bytes = resident.get(GRADIENTS, 0) if steps > 1 else 0
    stored_numel = drive[GRADIENTS] // window.sum_itemsize
    passes_gradients = window.read_bytes * stored_numel
    held_bytes, both_bytes = _pass_bytes(drive[PARAMETERS], shapes, request, knobs)
    passes_parameters = steps * both_bytes - (steps - 1) * held_bytes
    halves_bytes = written_parameters if request.splits_master else 0
    read = {
        PARAMETERS: passes_parameters + halves_bytes,
        GRADIENTS: passes_gradients + drive[GRADIENTS],
        MASTER: drive[MASTER],
        STATE: drive[STATE],
    }
    written = {
        PARAMETERS: written_parameters,
        GRADIENTS: window.written_bytes * stored_numel + given_way_bytes,
    }
    on_drive = drive | {GRADIENTS: window.drive_bytes * stored_numel + given_way_bytes}
    passes_written = written[GRADIENTS]
    updates_bytes, second_bytes, applied_bytes = _matrices_bytes(shapes, request, resident)
    on_drive |= {SECOND_MATRICES: second_bytes} if second_bytes else {}
    for moved in (read, written, on_drive):
        moved[GRADIENTS] += updates_bytes
    early_numel = _early_numel(shapes, request, resident)
    if early_numel:
        parameters = learning * request.param_itemsize
        early = Fraction(early_numel, learning)
        on_drive[SECOND_VALUES] = int(early * (parameters + totals[MASTER] + totals[STATE]))
        # Resident parameters read their new values from the drive if a tile of their sub-group was
        # stepped early: at most all of them.
        kept_bytes = min(resident.get(PARAMETERS, 0), parameters)
        read[SECOND_VALUES] = written[SECOND_VALUES] = int(early * kept_bytes)
        # Sums of gradients go to their tiles instead of the drive, or beside it, except tiles that
        # are left to the next forward pass, and sub-groups that are not stepped early.
        bypassing_numel = min(stored_numel, early_numel)
        left_numel = bypassing_numel // LEFT_ONE_OF if request.overlaps else 0
        sums_bytes = window.sum_itemsize * (bypassing_numel - left_numel)
        read[GRADIENTS] -= sums_bytes
        if not request.guesses:
            written[GRADIENTS] -= sums_bytes
            passes_written -= sums_bytes
    if request.verify != "off":
        on_drive[ROUNDING] = rounding_bytes(shapes, request)
    return {
        "drive": on_drive,
        "read_bytes": read,
        "written_bytes": read | written,
        "passes_read_bytes": passes_parameters + passes_gradients,
        "handed_over_bytes": 0
        if early_numel
        else max(0, _handed_over(shapes, request, drive, knobs) - applied_bytes),
        "halves_read_bytes": halves_bytes,
        "passes_written_bytes": passes_written,
        "updates_bytes": updates_bytes,
        "backward_parameters_bytes": both_bytes - drive[PARAMETERS],
        "early_numel": early_numel,
    }


def _room(shapes: ModelShapes, request: PlanRequest, knobs: Knobs) -> dict[str, Any]:
    """Return the room for waiting gradients, and the part that finds none, as Plan's fields."""
    layers = [
        [one.shard_numel(request.world) for one in layer if one.trainable]
        for layer in shapes.layers()
    ]
    counts = Counter(map(sum, layers))
    repeated = [numel for numel, count in counts.items() if count >= REPEATED_COUNT_MIN]
    room_bytes = request.gradient_room_bytes
    if room_bytes is None:
        layer_bytes = max(repeated or counts) * request.gradient_itemsize
        room_bytes = min(page_up(layer_bytes), GRADIENT_ROOM_BYTES_MAX)
    if request.optimizer_device != "nvme" or not request.is_tiled:
        room_bytes = 0
    # Some wait in host memory: in staging slots, or in the blocks of tiles that are stepped early.
    host_numel = knobs.staging_slot_count * knobs.staging_slot_bytes // request.gradient_itemsize
    if request.during_backward:
        spares = spare_count(request, knobs.tile_count)
        host_numel = (spares + knobs.tile_count) * knobs.tile_numel
    room_numel = room_bytes // request.gradient_itemsize
    beyond_numel = 0
    for layer in layers:
        waiting_numel = min(room_numel, sum(numel for numel in layer if numel <= room_numel))
        beyond_numel += max(0, sum(layer) - waiting_numel - host_numel)
    return {
        "gradient_room_bytes": room_bytes,
        "held_up": beyond_numel / max(1, sum(map(sum, layers))),
    }


def _pass_bytes(
    nbytes: int, shapes: ModelShapes, request: PlanRequest, knobs: Knobs
) -> tuple[int, int]:
    """Return (bytes still in slots when a pass ends, bytes that forward and backward read).

    Counts parameters, of which `nbytes` are on the drive. Shards still in slots are not read again
    by the next pass, unless a step has changed them: this applies at the end of forward, and at the
    end of backward in all micro-steps but the last. Without room to read a layer ahead none is
    kept. With one rank and a drive faster than the layers compute, fewer are still in slots.
    """
    held_bytes = 0
    if knobs.prefetch_bytes >= knobs.slot_bytes:
        shards = _shards_bytes(shapes, request)
        slotted_bytes = sum(size for size in shards if size <= knobs.slot_bytes)
        held_bytes = min(nbytes, slotted_bytes, knobs.layer_bytes + knobs.prefetch_bytes)
    # Parameters that forward used last are still on the device, too.
    both_bytes = min(request.passes_bytes(nbytes, shapes.numel), 2 * nbytes - held_bytes)
    return held_bytes, both_bytes


def _handed_over(
    shapes: ModelShapes, request: PlanRequest, drive: Mapping[str, int], knobs: Knobs
) -> int:
    """Return the bytes of new parameters that the walk copies to slots of a waiting forward pass.

    All parameters on the drive that are trained and have slots; none if the walk does not overlap
    the forward pass. Fewer are copied where forward computes longer than the walk takes.
    """
    if not request.overlaps or request.optimizer_device != "nvme":
        return 0
    trained = [one.shard_numel(request.world) for one in shapes.trainable]
    sizes = [numel * request.param_itemsize for numel in trained]
    return min(drive[PARAMETERS], sum(size for size in sizes if size <= knobs.slot_bytes))


def _not_ours(shapes: ModelShapes, request: PlanRequest, knobs: Knobs) -> dict[str, int]:
    learning = sum(tensor.shard_numel(request.world) for tensor in shapes.trainable)
    master = request.master_itemsize
    found = {}
    if knobs.tile_numel and not request.has_known_start:
        nbytes = math.ceil(knobs.tile_numel * request.states_bytes)
        found["torch: optimizer state of one tile, first step"] = nbytes
    if request.parameters_device == "cpu":
        found["DeepSpeed: parameters on the CPU"] = sum(_shards_bytes(shapes, request))
    if request.optimizer_device == "cpu":
        # Master weights, states, gradients in their dtype, and the flat buffer of gradients.
        per_element = 2 * master + request.states_bytes + request.gradient_itemsize
        found["DeepSpeed: optimizer and gradients on the CPU"] = math.ceil(learning * per_element)
    return found
