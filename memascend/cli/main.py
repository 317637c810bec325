"""Entry point of the `memascend` command: parses, calls one sub-command, returns its exit status.

0 is success, 1 a problem found, 2 a mistake in the command line.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from memascend.cli.checkpoint import checkpoint_command_parser
from memascend.cli.compare.command import compare_command_parser
from memascend.cli.config import config_command_parser
from memascend.cli.doctor import doctor_command_parser
from memascend.cli.env import env_command_parser
from memascend.cli.monitor import monitor_command_parser
from memascend.cli.plan import plan_command_parser
from memascend.cli.volume.command import volume_command_parser
from memascend.errors import MemAscendError
from memascend.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="memascend", description="SSD-offloaded fine-tuning in a fraction of the host memory."
    )
    parser.add_argument("--version", action="version", version=f"memascend {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    checkpoint_command_parser(commands)
    compare_command_parser(commands)
    config_command_parser(commands)
    doctor_command_parser(commands)
    env_command_parser(commands)
    monitor_command_parser(commands)
    plan_command_parser(commands)
    volume_command_parser(commands)
    words = sys.argv[1:] if arguments is None else list(arguments)
    if os.environ.get("COLUMNS", "").strip() == "0":  # an unknown width, which rich takes for none
        del os.environ["COLUMNS"]
    try:
        try:
            status = _run(parser, words)
        finally:
            print(end="", flush=True)  # so that a closed reader shows here, not when Python ends
    except MemAscendError as error:
        print(f"memascend: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as head, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a folder that may not be entered, a name that is too long
        print(f"memascend: {error}. fix: name another path, or allow this one", file=sys.stderr)
        return 1
    return status


def _run(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    if not words:
        parser.print_help()
        return 0
    parsed = parser.parse_args(words)
    status: int = parsed.run(parsed)
    return status


if __name__ == "__main__":
    sys.exit(main())
