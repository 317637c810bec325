"""`memascend volume`: measure drives, and prepare raw devices. Each action is in its own file."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

from memascend.base.units import MIB, parse_nbytes
from memascend.errors import ConfigError

BENCH_EPILOG = """\
example:
  memascend volume bench /mnt/nvme0 /mnt/nvme1

First a sweep over sizes and numbers of requests, on all drives at the same time, finds the setting;
then each drive is measured with it alone, and all of them together. The data goes to nameless files
that are gone when the command ends. What else uses the drives meanwhile shows in the figures.

A consumer drive writes fast until its cache is full, and training fills it. --sustained writes to
all drives at the same time until the rate has settled, at most the --share of their free space, and
shows where the cache ends. It takes minutes and wears the drive by that much.
Exit status: 0 when everything was measured, 1 otherwise."""


def volume_command_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the sub-command and its own sub-commands."""
    parser = commands.add_parser(
        "volume",
        help="measure drives; prepare raw block devices",
        description="The drives that tensors go to: measure them, or prepare raw devices.",
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    _add_bench(actions)
    _add_format(actions)
    show = actions.add_parser("show", help="what is on a device, and who uses it; changes nothing")
    show.add_argument("device", metavar="DEVICE", help="a block device, such as /dev/nvme1n1")
    show.add_argument("--json", action="store_true", help="machine-readable output")
    show.set_defaults(run=_device_action, action="show")
    wipe = actions.add_parser("wipe", help="give a formatted device back, with nothing on it")
    wipe.add_argument("device", metavar="DEVICE", help="one with memascend's header")
    wipe.add_argument("--yes", action="store_true", help="do not ask")
    wipe.set_defaults(run=_device_action, action="wipe")


def _add_format(actions: argparse._SubParsersAction[Any]) -> None:
    parser = actions.add_parser(
        "format",
        help="make a raw volume of a block device; destroys what is on it",
        description="Make a raw volume of a block device. Destroys what is on it. A device that "
        "carries a partition table, a file system or the like, or is in use, is refused.",
    )
    parser.add_argument("device", metavar="DEVICE", help="a block device, such as /dev/nvme1n1")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument(
        "--owner",
        type=int,
        metavar="UID",
        help="user whose runs may use it (default: you; with sudo: who called it)",
    )
    parser.set_defaults(run=_device_action, action="format")


def _add_bench(actions: argparse._SubParsersAction[Any]) -> None:
    bench = actions.add_parser(
        "bench",
        help="read, write and mixed speed, and the best request size and depth",
        description="How fast drives are, through the engine that training uses.",
        epilog=BENCH_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_argument(
        "paths", nargs="+", type=Path, metavar="PATH", help="folder on a drive, or raw volume"
    )
    bench.add_argument("--json", action="store_true", help="machine-readable output")
    bench.add_argument(
        "--seconds", type=_seconds, default=1.0, help="of each measurement (default: 1)"
    )
    bench.add_argument(
        "--span",
        type=_span_bytes,
        default=1024 * MIB,
        metavar="BYTES",
        help='written and read over and over on each drive (default: "1GiB")',
    )
    bench.add_argument(
        "--engine",
        choices=("auto", "uring", "libaio", "threads"),
        default="auto",
        help="(default: auto)",
    )
    bench.add_argument("--chunk", type=_sizes, metavar="LIST", help='sizes to try: "512KiB,1MiB"')
    bench.add_argument("--depth", type=_depths, metavar="LIST", help='depths to try: "16,32,64"')
    bench.add_argument("--no-fio", action="store_true", help="do not compare with fio")
    bench.add_argument(
        "--sustained",
        action="store_true",
        help="write until the rate has settled; then the mixed and the read rate",
    )
    bench.add_argument(
        "--share",
        type=_share,
        metavar="PART",
        help="with --sustained: part of the free space to write at most (default: 0.5, more than "
        "the third that a cache can be)",
    )
    bench.add_argument(
        "--plot", type=Path, metavar="FILE", help="with --sustained: draw the rate over the bytes"
    )
    bench.set_defaults(run=_bench, usage_error=bench.error)


def _bench(args: argparse.Namespace) -> int:
    from memascend.cli.volume.bench import volume_bench_command
    from memascend.cli.volume.sustained import sustained_command

    if args.sustained:
        for name in ("chunk", "depth"):
            if len(getattr(args, name) or [0]) > 1:
                args.usage_error(f"--{name} takes one value with --sustained")
        return sustained_command(args)
    for name in ("share", "plot"):
        if getattr(args, name) is not None:
            args.usage_error(f"--{name} needs --sustained")
    return volume_bench_command(args)


def _device_action(args: argparse.Namespace) -> int:
    from memascend.cli.volume.device import volume_device_command

    return volume_device_command(args)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.01 <= float(text) <= 600:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text}: from 0.01 to 600")


def _share(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= 0.95:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text}: above 0, at most 0.95")


def _span_bytes(text: str) -> int:
    nbytes = _nbytes(text)
    if nbytes < 16 * MIB:
        raise argparse.ArgumentTypeError(f"{text}: at least 16MiB")
    return nbytes


def _sizes(text: str) -> list[int]:
    sizes = [_nbytes(part) for part in text.split(",")]
    for size in sizes:
        if size % (64 << 10) or not 64 << 10 <= size <= 64 << 20:  # as the block takes them
            raise argparse.ArgumentTypeError(f"{text}: multiples of 64KiB up to 64MiB")
    return sizes


def _depths(text: str) -> list[int]:
    with contextlib.suppress(ValueError):
        depths = [int(part) for part in text.split(",")]
        if all(1 <= depth <= 4096 for depth in depths):
            return depths
    raise argparse.ArgumentTypeError(f"{text}: from 1 to 4096")


def _nbytes(text: str) -> int:
    try:
        return parse_nbytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
