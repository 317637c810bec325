"""Step time in `memascend plan`: its options and its output."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from memascend.base.units import format_nbytes
from memascend.cli.plan_drive import short_rates
from memascend.cli.plan_sizes import existing
from memascend.config.environment import cache_directory
from memascend.plan.context import with_activations
from memascend.plan.derive import SECOND_VALUES, Plan
from memascend.plan.drive_rates import READ_GB_S, WRITE_GB_S, DriveRates
from memascend.plan.footprint import Footprint
from memascend.plan.step_time import DriveTime
from memascend.volumes.kept import SHORT_RATES_FILE, KeptRates, identity, kept_rates

#: A share of the gradients above that of an embedding and a head, which find no room by default.
HELD_UP_MIN = 0.25


@dataclass(frozen=True, slots=True)
class CountedRates:
    """The rates that a command counts with, and where they are from."""

    rates: DriveRates
    source: str  # a sentence
    kind: str  # the same in a word or two


def add_time_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the drive's sustained rates and the compute time of the passes."""
    for name, does, default in (
        ("read", "reads", f"{READ_GB_S:g}"),
        ("write", "writes for long", f"{WRITE_GB_S:g}"),
        ("mixed", "reads and writes at the same time, both counted", "as if they took turns"),
    ):
        parser.add_argument(
            f"--drive-{name}",
            type=_rate_or_seconds,
            metavar="GB/s",
            help=f"10^9 bytes per second that the drive {does} (default: {default}; with --config "
            "the rates that `memascend volume bench --sustained` has measured here)",
        )
    parser.add_argument(
        "--compute",
        type=_rate_or_seconds,
        nargs=2,
        metavar=("FORWARD", "BACKWARD"),
        help="compute seconds of a micro-step's passes, with --context those of --batch: gives the "
        "least time of a step",
    )


def ranks_of_node(args: argparse.Namespace) -> int:
    """Return the number of ranks per machine, which share its drive."""
    return int(args.world // args.nodes)


def rates_of(args: argparse.Namespace, paths: Sequence[str] = ()) -> CountedRates:
    """Return the rates to count with: those stated, else those measured, else the defaults.

    `paths` are the folders or devices of the volumes. Their measured rates are used only if no rate
    is stated, as rates of one drive belong together. A drive that --path names is measured.
    """
    names = ("read", "write", "mixed")
    stated = {name: value for name in names if (value := getattr(args, f"drive_{name}"))}
    if not stated and (found := measured_rates(paths)):
        return found
    if not stated and args.path is not None and (short := short_rates(args.path)):
        return _of_short(short, str(args.path))
    assumed = [name for name in ("read", "write") if name not in stated]
    source = "as stated"
    if assumed:
        source = (
            f"{' and '.join(assumed)} not measured, but assumed: a modest consumer drive whose "
            "write cache is full. `memascend volume bench --sustained` measures yours"
        )
    if "mixed" not in stated:
        source += "; reads and writes are taken to take turns"
    rates = DriveRates(**{f"{name}_gb_s": stated[name] for name in stated})
    drives = 1 if stated else drive_count_of(paths)
    if drives == 1:
        return CountedRates(rates, source, "assumed" if assumed else "stated")
    sums = DriveRates(read_gb_s=drives * rates.read_gb_s, write_gb_s=drives * rates.write_gb_s)
    return CountedRates(sums, f"{source}; {drives} drives", f"assumed of {drives} drives")


def drive_count_of(paths: Sequence[str]) -> int:
    """Return the number of drives below the folders of volumes; a missing device counts as one."""
    found = set()
    for path in paths:
        try:
            found.add(identity(existing(path)))
        except OSError:
            found.add(path)
    return max(1, len(found))


def _of_short(found: KeptRates, path: str) -> CountedRates:
    """Return the rates after a short measurement.

    A write cache may have taken its writes, so they are counted as those of a modest drive if they
    were faster.
    """
    source = f"measured for some seconds on {path}{_when(found)}"
    if found.write_gb_s <= WRITE_GB_S:
        return _as_measured(found, source)
    source += (
        f"; writes are counted at {WRITE_GB_S:g} of {found.write_gb_s:.3g} GB/s, since a write "
        "cache may have taken them: `memascend volume bench --sustained` measures yours"
    )
    return CountedRates(DriveRates(read_gb_s=found.read_gb_s), source, "writes assumed")


def measured_rates(paths: Sequence[str]) -> CountedRates | None:
    """Return the rates that were measured of the drives below these paths; None if none were.

    Sustained rates come before those of a short measurement.
    """
    cache, named = cache_directory(), ", ".join(paths)
    paths = list(map(existing, paths))
    if found := kept_rates(paths, cache=cache):
        source = f"measured by `memascend volume bench --sustained` on {named}{_when(found)}"
        return _as_measured(found, source)
    short = kept_rates(paths, cache=cache, name=SHORT_RATES_FILE)
    return _of_short(short, named) if short else None


def _as_measured(found: KeptRates, source: str) -> CountedRates:
    rates = DriveRates(
        read_gb_s=found.read_gb_s, write_gb_s=found.write_gb_s, mixed_gb_s=found.mixed_gb_s
    )
    return CountedRates(rates, source, f"measured{_when(found)}")


def _when(found: KeptRates) -> str:
    return "" if found.day is None else f" on {found.day}"


def describe_rates(rates: DriveRates) -> str:
    """Return the rates in words."""
    return (
        f"{rates.read_gb_s:.3g} GB/s read, {rates.write_gb_s:.3g} GB/s written and "
        f"{rates.both_gb_s:.3g} GB/s of both at the same time"
    )


def drive_seconds(plan: Footprint, args: argparse.Namespace) -> float:
    """Return the drive time of a step in seconds."""
    return plan.step_seconds(args.drive.rates, ranks=ranks_of_node(args))


def least_seconds(plan: Plan, args: argparse.Namespace, *, activation_bytes: int = 0) -> float:
    """Return the least time of a step: beside compute if that is stated, else of the drive.

    A micro-step saves `activation_bytes` on the drive.
    """
    if args.compute is None:
        steps = plan.request.gradient_accumulation_steps
        return drive_seconds(with_activations(plan, activation_bytes, steps), args)
    return drive_time(plan, args, activation_bytes=activation_bytes).step_s(*args.compute)


def drive_time(plan: Plan, args: argparse.Namespace, *, activation_bytes: int = 0) -> DriveTime:
    """Return the drive time of a step's parts; a micro-step saves `activation_bytes` there."""
    return DriveTime.of_plan(
        plan, args.drive.rates, ranks=ranks_of_node(args), activation_bytes=activation_bytes
    )


def rate_notes(args: argparse.Namespace) -> list[str]:
    """Return notes on the rates of the drive, and where they are from."""
    return [
        "drive time: all planned bytes, first those of the passes, then those of the optimizer, at "
        f"{describe_rates(args.drive.rates)} (--drive-read, --drive-write, --drive-mixed; 1 GB is "
        "10^9 bytes), shared by all ranks of a machine",
        f"rates of the drive: {args.drive.source}",
    ]


def time_notes(plan: Plan, args: argparse.Namespace) -> list[str]:
    """Return notes on the drive's rates, and on how far compute hides the optimizer's part."""
    drive = drive_time(plan, args)
    notes = rate_notes(args)
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


def _rate_or_seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 1e-6 <= float(text) <= 1e6:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number from 1e-6 to 1e6, got {text[:40]}")
