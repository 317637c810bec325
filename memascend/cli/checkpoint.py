"""`memascend checkpoint`: work on a checkpoint outside of training."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from memascend.errors import CheckpointError

UNIVERSAL_EPILOG = """\
example:
  memascend checkpoint to-universal checkpoints/global_step500

Makes checkpoints/global_step500_universal and checkpoints/latest_universal, as DeepSpeed's
ds_to_universal.py does, in 1 MiB of memory for tensors of any size. Any number of ranks loads it
with "checkpoint": {"load_universal": true} in the DeepSpeed JSON, with memascend or without."""


def checkpoint_command_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the sub-command and its own sub-commands."""
    parser = commands.add_parser(
        "checkpoint",
        help="convert a checkpoint",
        description="Work on a checkpoint outside of training.",
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    universal = actions.add_parser(
        "to-universal",
        help="convert a ZeRO stage 3 checkpoint into a universal one",
        description="Convert a checkpoint of memascend, or of DeepSpeed with CPU offload, into a "
        "universal one. It is verified first, and not changed.",
        epilog=UNIVERSAL_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    universal.add_argument("folder", type=Path, metavar="FOLDER", help="folder of the tag")
    universal.add_argument(
        "--output", type=Path, metavar="FOLDER", help="default: FOLDER_universal"
    )
    universal.set_defaults(run=_to_universal)


def _to_universal(args: argparse.Namespace) -> int:
    try:
        from memascend.checkpoint.to_universal import write_universal
    except ImportError as error:
        raise CheckpointError(
            f"cannot read checkpoints: {error}. Likely cause: DeepSpeed is not installed here. "
            "Use the environment that trains"
        ) from error
    folder = Path(args.folder).absolute()
    output = Path(args.output or f"{folder}_universal").absolute()
    log = logging.getLogger("memascend")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        count = write_universal(folder, output)
    finally:
        log.setLevel(level)
    print(
        f"{output}: {count} parameters. To load it: "
        '"checkpoint": {"load_universal": true} in the DeepSpeed JSON'
    )
    return 0
