"""`python -m memascend`: the command line, where no script is on the PATH."""

from __future__ import annotations

import sys

from memascend.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
