#!/usr/bin/env python3
"""Has DeepSpeed compile its operators now, saying what is being waited for.

Otherwise they are compiled at first use, in silence and inside whatever test or run comes first.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from rich.console import Console

from memascend.cli.compare.command import show_warm_up


def main() -> int:
    """Compiles, and names what cannot be compiled here; only a crash is a failure."""
    console = Console(markup=False, highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory() as folder:
        found = show_warm_up(console, Path(folder))
    for name, reason in found.unavailable.items():
        console.print(f"{name} is not available here: {reason}")
    return 1 if found.problem else 0


if __name__ == "__main__":
    sys.exit(main())
