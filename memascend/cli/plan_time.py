"""Step time in `memascend plan`: its options and its output."""

from __future__ import annotations

import argparse
import contextlib
import math
from typing import Any

from memascend.base.units import format_nbytes
from memascend.plan.derive import SECOND_VALUES, Plan
from memascend.plan.footprint import Footprint
from memascend.plan.step_time import DriveTime

#: Sustained bandwidth of a PCIe 4.0 drive; shown in the output, since only a measurement is exact.
DRIVE_READ_GB_S, DRIVE_WRITE_GB_S = 5.0, 3.0
#: A share of the gradients above that of an embedding and a head, which find no room by default.
HELD_UP_MIN = 0.25


def add_time_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the drive's bandwidth and the compute time of the passes."""
    for name, does, default in (
        ("read", "reads", DRIVE_READ_GB_S),
        ("write", "writes", DRIVE_WRITE_GB_S),
    ):
        parser.add_argument(
            f"--drive-{name}",
            type=_above_zero,
            default=default,
            metavar="GB/s",
            help=f"10^9 bytes per second that the drive {does} (default: {default:g})",
        )
    parser.add_argument(
        "--compute",
        type=_above_zero,
        nargs=2,
        metavar=("FORWARD", "BACKWARD"),
        help="compute seconds of a micro-step's passes, with --context those of --batch: gives the "
        "least time of a step",
    )


def ranks_of_node(args: argparse.Namespace) -> int:
    """Return the number of ranks per machine, which share its drive."""
    return int(args.world // args.nodes)


def drive_seconds(plan: Footprint, args: argparse.Namespace) -> float:
    """Return the drive time of a step in seconds."""
    return plan.step_seconds(**_speeds(args))


def drive_time(plan: Plan, args: argparse.Namespace, *, activation_bytes: int = 0) -> DriveTime:
    """Return the drive time of a step's parts; a micro-step saves `activation_bytes` there."""
    return DriveTime.of_plan(plan, activation_bytes=activation_bytes, **_speeds(args))


def time_notes(plan: Plan, args: argparse.Namespace) -> list[str]:
    """Return notes on how far compute hides the optimizer's drive time."""
    drive = drive_time(plan, args)
    notes = []
    if plan.drive.get(SECOND_VALUES):
        what = "a part of the optimizer" if drive.optimizer_s else "the optimizer"
        notes.append(
            f"{what} overlaps the last backward pass; it is free only if that pass computes for "
            f"{drive.last_backward_s:.1f} s or longer"
        )
    if plan.held_up > HELD_UP_MIN:
        notes.append(
            f"the last backward pass waits for the drive for about {drive.last_held_up_s:.1f} s, "
            f"and computes nothing meanwhile: {plan.held_up:.0%} of the "
            f"gradients find no room on the device ({format_nbytes(plan.gradient_room_bytes)}, "
            "memascend.streaming.gradients.device_bytes) or in host memory"
        )
    if drive.goes_behind:
        rest = "the rest of the optimizer" if plan.drive.get(SECOND_VALUES) else "the optimizer"
        notes.append(
            f"{rest} overlaps the next forward pass; it is free only if that pass computes for "
            f"{drive.behind_s:.1f} s or longer"
        )
    elif drive.optimizer_s:
        what = "the optimizer" if plan.tile_numel else "writing new parameters"
        notes.append(f"{what} takes {drive.optimizer_s:.1f} s after backward, without overlap")
    if args.compute is not None:
        forward_s, backward_s = args.compute
        notes.append(
            f"with passes that compute for {forward_s:g} s and {backward_s:g} s, a step takes "
            f"{drive.step_s(*args.compute):.1f} s or longer, of which the optimizer adds "
            f"{drive.unhidden_s(*args.compute):.1f} s"
        )
    return notes


def time_json(plan: Plan, args: argparse.Namespace) -> dict[str, float | None]:
    """Return the numbers for `--json`."""
    drive = drive_time(plan, args)
    found = {"hiding_forward_seconds": drive.behind_s if drive.goes_behind else None}
    if args.compute is not None:
        found["least_seconds"] = drive.step_s(*args.compute)
        found["unhidden_seconds"] = drive.unhidden_s(*args.compute)
    return found


def _speeds(args: argparse.Namespace) -> dict[str, Any]:
    """Return the drive's bandwidth and ranks, as keyword arguments of the plan's functions."""
    return {
        "read_gb_s": args.drive_read,
        "write_gb_s": args.drive_write,
        "ranks": ranks_of_node(args),
    }


def _above_zero(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number above 0, got {text[:40]}")
