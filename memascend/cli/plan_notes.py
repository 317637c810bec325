"""Notes of `memascend plan`: how its numbers were found, and warnings about settings."""

from __future__ import annotations

import argparse
import math

from memascend.base.streams import PARAMETERS
from memascend.base.units import TIB, format_nbytes
from memascend.cli.plan_accounts import DEFAULT_NOTE, Accounts
from memascend.cli.plan_time import least_seconds, ranks_of_node, time_notes
from memascend.config.block import MemAscendConfig
from memascend.config.deepspeed import DeepSpeedSettings
from memascend.config.environment import is_disabled
from memascend.plan.advice import (
    advise,
    advise_in_cpu,
    advise_one_pass,
    advise_pinning,
    advise_wear,
)
from memascend.plan.derive import ROUNDING, Plan
from memascend.plan.muon import advise_muon, note_device
from memascend.plan.optimizer_dtypes import fewer_bits, inexactness
from memascend.plan.request import sections_off, why_not_during_backward, why_whole_steps
from memascend.plan.second_values import advise_during_backward
from memascend.plan.shapes import ModelShapes

#: The largest file of ext4 with blocks of 4 KiB.
EXT4_FILE_BYTES = 16 * TIB


def notes_of(accounts: Accounts, args: argparse.Namespace) -> list[str]:
    """Return how the numbers were found, and what other settings would change."""
    plan = accounts.memascend
    notes = [
        *time_notes(plan, args),
        "the columns do not count Python, torch, the device's context, activations, the page cache",
    ]
    if plan.drive[PARAMETERS]:
        notes.insert(
            2,
            "parameters are read in forward and in backward, in each of "
            f"{plan.request.gradient_accumulation_steps} micro-step(s), except those that "
            "stage3_max_reuse_distance keeps on the device between the two",
        )
    if args.config is None:
        notes.insert(0, DEFAULT_NOTE)
    notes += [
        f"in addition to memascend: {name}: {format_nbytes(n)}" for name, n in plan.not_ours.items()
    ]
    notes += [f"stock: {note}" for note in accounts.stock.notes]
    if plan.tile_numel and not plan.is_tiled:
        notes.append(
            f"{plan.request.optimizer} is not known to work element by element: a tile is a whole "
            "sub-group"
        )
    if plan.checksum_bytes:
        notes.append(
            f"verify {plan.request.verify}: 4 bytes of checksum for each 64 KiB on the drive; keys "
            f"are rounded up to 64 KiB (at most {format_nbytes(plan.drive[ROUNDING])} more on the "
            "drive)"
        )
    notes += _note_of_drives(plan)
    notes.append(advise(accounts.shapes, plan))
    notes.append(
        advise_during_backward(accounts.shapes, plan, lambda one: least_seconds(one, args))
    )
    notes.append(advise_in_cpu(accounts.shapes, plan))
    notes.append(note_device(accounts.shapes, plan.request))
    notes.append(
        advise_wear(
            accounts.shapes, plan, accounts.settings, accounts.block, ranks=ranks_of_node(args)
        )
    )
    if args.config is not None:
        notes.append(advise_pinning(accounts.shapes, plan, accounts.settings))
    if plan.limit_bytes is not None:
        notes.append(
            f"limit: {format_nbytes(plan.limit_bytes)} per rank ({plan.limit_bytes} bytes)"
        )
    return [note for note in notes if note]


def warnings_of(accounts: Accounts, *, accumulates: bool = True) -> list[str]:
    """Return warnings: settings without effect, and assumptions that may not hold.

    With `accumulates` the traffic that accumulation adds is among them.
    """
    plan, settings = accounts.memascend, accounts.settings
    notes = _note_of_packed(accounts.shapes) + _note_of_quantized(accounts)
    notes += _note_of_files(plan.drive_bytes, plan.request.volume_count)
    notes += _notes_of_block(accounts.block, settings, plan.request.world)
    notes.append(advise_muon(accounts.shapes, settings))
    if accumulates:
        micro_batches = accounts.block.micro_batches
        notes.append(advise_one_pass(accounts.shapes, plan, settings, micro_batches))
    return [note for note in notes if note]


def _note_of_packed(shapes: ModelShapes) -> list[str]:
    """Return a note if some tensors are not floats, which only checkpoint files show."""
    packed = [tensor for tensor in shapes.tensors if tensor.itemsize is not None]
    if not packed:
        return []
    nbytes = sum(tensor.shard_bytes(1, 0) for tensor in packed)
    return [
        f"{len(packed)} tensor(s) that are not floats ({format_nbytes(nbytes)}) are assumed to be "
        "frozen, all others to be trained"
    ]


def _note_of_quantized(accounts: Accounts) -> list[str]:
    """Return a note if the model's config.json says that its weights are packed."""
    if not (accounts.shapes.config or {}).get("quantization_config"):
        return []
    return [
        "config.json has a quantization_config: all weights are counted in "
        f"{accounts.settings.precision}, as after dequantize(); packed ones cannot be trained"
    ]


def _note_of_files(drive_bytes: int, volume_count: int) -> list[str]:
    """Return a note if a rank's file on one volume is too large for ext4."""
    file_bytes = math.ceil(drive_bytes / volume_count)
    if file_bytes <= EXT4_FILE_BYTES:
        return []
    return [
        f"each rank has a file of {format_nbytes(file_bytes)} on each volume, and ext4 limits a "
        f"file to {format_nbytes(EXT4_FILE_BYTES)}: name "
        f"{math.ceil(drive_bytes / EXT4_FILE_BYTES)} directories in volumes, or use XFS"
    ]


def _note_of_drives(plan: Plan) -> list[str]:
    """Return a note if tiles, staging slots and prefetch are those of several drives."""
    wanted, found = plan.request.drive_count, plan.drive_count
    if wanted == 1:
        return []
    sizes = f"tiles, staging slots and prefetch keep {found} of {wanted} drives busy for each rank"
    return [sizes if found == wanted else f"{sizes}: the limit has no room for more"]


def _notes_of_block(block: MemAscendConfig, settings: DeepSpeedSettings, world: int) -> list[str]:
    """Return notes on settings of the JSON that make a run differ from memascend's column."""
    notes = []
    if is_disabled():
        notes.append("MEMASCEND_DISABLE is set: a run would use stock DeepSpeed")
    elif not block.enabled:
        notes.append("memascend.enabled is false: a run would use stock DeepSpeed")
    elif off := sections_off(block):
        notes.append(
            f"memascend's column is for all sections; this JSON turns off: {', '.join(off)}"
        )
    if block.streaming.optimizer.enabled and (reason := why_whole_steps(settings)):
        notes.append(
            f"memascend's column is for steps in tiles, but streaming.optimizer is not used: "
            f"{reason}. Host memory of a run grows with the model"
        )
    is_demanded = block.streaming.optimizer.during_backward is True
    if is_demanded and (reason := why_not_during_backward(block, settings, world=world)):
        notes.append(f"streaming.optimizer.during_backward has no effect: {reason}")
    if fewer_bits(block):
        notes.append(f"inexact: {inexactness(block)}")
    return notes
