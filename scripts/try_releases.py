#!/usr/bin/env python3
"""Runs the quick tests of parity with other releases of DeepSpeed, and all else as installed.

`make test-releases` has the oldest release that is supported and one in the middle. Each is put
into .venv/releases, with operators of its own, and stands before the installed one on the path.
`make test-versions` tries every release, with each torch and transformers, and takes hours.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from environments import COMPILE, ROOT, TRAINING

FOLDER = ROOT / ".venv" / "releases"
#: Not each section alone, which the newest release has and whose runs need stock's drives: another
#: operator to compile. Nor cases that end in an error without memascend as well: stock's drives on
#: a CPU (0.18.4), and steps taken by the script (`managed_gradient_accumulation`, since 0.19.5).
FILES = tuple(f"tests/parity/test_{name}.py" for name in ("parity", "api_parity", "divisions"))
WORDS = ("-m", "not full", "-k", "not every_section_alone and not saver and not stepped")
TESTS = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *WORDS, *FILES)
CHECK = "import sys, deepspeed; sys.exit(deepspeed.__version__ != sys.argv[1])"


def main(arguments: Sequence[str] | None = None) -> int:
    """Try each release, and name those that failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("release", nargs="+", help="such as 0.18.4")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where releases are put")
    args = parser.parse_args(arguments)
    tried = {release: try_release(release, args.folder) for release in args.release}
    problems = [f"{release}: {problem}" for release, problem in tried.items() if problem]
    print("\n".join(problems) or f"passed with {', '.join(args.release)}")
    return 1 if problems else 0


def try_release(release: str, folder: Path) -> str:
    """Install a release and run the tests with it; return the problem, or nothing."""
    print(f"== DeepSpeed {release}", flush=True)
    place = folder / release
    if not (place / "ready").exists():
        shutil.rmtree(place, ignore_errors=True)
        if call(*pip(f"deepspeed=={release}", place)) != 0:
            return "pip cannot install it"
        (place / "ready").touch()
    paths = os.pathsep.join(filter(None, [str(place), os.environ.get("PYTHONPATH", "")]))
    variables = {"PYTHONPATH": paths, "TORCH_EXTENSIONS_DIR": str(place / "operators")}
    for words, problem in (
        (("-c", CHECK, release), "another one was imported"),
        (("-c", COMPILE, *TRAINING), "its operators cannot be compiled"),
        (TESTS, "tests of parity failed"),
    ):
        if call(*words, **variables) != 0:
            return problem
    return ""


def pip(requirement: str, place: Path) -> tuple[str, ...]:
    """Return the words that install one package alone; its source package imports torch."""
    extra = os.environ.get("PIP_ARGS", "").split()
    words = ("--quiet", "--disable-pip-version-check", "--no-build-isolation", "--no-deps")
    return ("-m", "pip", "install", *words, *extra, "--target", str(place), requirement)


def call(*words: str, **variables: str) -> int:
    """Run the environment's Python in the checkout, and return its status."""
    environment = os.environ | {"DS_BUILD_OPS": "0"} | variables
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
