#!/usr/bin/env python3
"""Runs the quick tests of parity with other releases of DeepSpeed, and all else as installed.

`make test-releases` has the oldest release that is supported and one in the middle. Each is put
into .venv/releases, with operators of its own, and stands before the installed one on the path.
With --smoke a few tests run with the operators that are compiled for the installed release, within
a minute: tests of `make test-all` do that with both. They show the release's Python, and not the
powers of Adam's betas as an operator before 0.19.0 computes them. `make test-versions` tries every
release, with each torch and transformers, and takes hours.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from environments import COMPILE, ROOT, TRAINING

FOLDER = ROOT / ".venv" / "releases"
#: Not each section alone, which the newest release has and whose runs need stock's drives: another
#: operator to compile. Nor cases that end in an error without memascend as well: stock's drives on
#: a CPU (0.18.4), and steps taken by the script (`managed_gradient_accumulation`, since 0.19.5).
FILES = tuple(f"tests/parity/test_{name}.py" for name in ("parity", "api_parity", "divisions"))
WORDS = ("-m", "not full", "-k", "not every_section_alone and not saver and not stepped")
TESTS = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *WORDS, *FILES)
#: One of each data path, most with one rank; Muon is not in every release.
SMOKE = (
    "not Muon and (test_training_gives and bf16-w2 and uring or resumed_run and fp16-w1"
    " or during_backward and bf16-w1 and not clipping or values_read and llama-bf16-w1"
    " or within_a_limit)"
)
CHECK = "import sys, deepspeed; sys.exit(deepspeed.__version__ != sys.argv[1])"
#: Operators that training needs, and their folders in deepspeed/ops. Their calls are the same in
#: all releases; how Adam's powers are rounded is found by a trial at the start.
SHARED = {"cpu_adam": "adam", "deepspeed_shm_comm": "comm"}
OPERATORS = ROOT / ".venv" / "torch_extensions"
#: Stands for an operator that was compiled when a release was installed.
OPERATOR = """import importlib.util
import sys

spec = importlib.util.spec_from_file_location("{name}", "{path}")
sys.modules[__name__] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[__name__])
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Try each release, and name those that failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("release", nargs="+", help="such as 0.18.4")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where releases are put")
    parser.add_argument("--smoke", action="store_true", help="a few tests, and nothing to compile")
    args = parser.parse_args(arguments)
    attempt = smoke_release if args.smoke else try_release
    tried = {release: attempt(release, args.folder) for release in args.release}
    problems = [f"{release}: {problem}" for release, problem in tried.items() if problem]
    print("\n".join(problems) or f"passed with {', '.join(args.release)}")
    return 1 if problems else 0


def try_release(release: str, folder: Path) -> str:
    """Install a release and run the tests with it; return the problem, or nothing."""
    place = folder / release
    return install(release, place) or run_with(
        place,
        (("-c", CHECK, release), "another one was imported"),
        (("-c", COMPILE, *TRAINING), "its operators cannot be compiled"),
        (TESTS, "tests of parity failed"),
    )


def smoke_release(release: str, folder: Path) -> str:
    """Run a few tests with a release and the installed one's operators; return the problem."""
    place = folder / f"{release}-smoke"
    if problem := install(release, place):
        return problem
    share_operators(place / "deepspeed")
    return run_with(
        place,
        (("-c", CHECK, release), "another one was imported"),
        ((*TESTS, "-n", "0", "-k", SMOKE), "tests of parity failed"),
    )


def install(release: str, place: Path) -> str:
    """Install a release into a folder, unless it is there; return the problem, or nothing."""
    print(f"== DeepSpeed {release}", flush=True)
    if not (place / "ready").exists():
        shutil.rmtree(place, ignore_errors=True)
        if call(*pip(f"deepspeed=={release}", place)) != 0:
            return "pip cannot install it"
        (place / "ready").touch()
    return ""


def share_operators(package: Path) -> None:
    """Let a release in a folder load the operators that are compiled for the installed one."""
    operators = Path(os.environ.get("TORCH_EXTENSIONS_DIR", OPERATORS))
    for name, folder in SHARED.items():
        compiled = operators / name / f"{name}.so"
        module = package / "ops" / folder / f"{name}_op.py"
        module.parent.mkdir(exist_ok=True)
        module.write_text(OPERATOR.format(name=name, path=compiled), encoding="utf-8")
    torch = ".".join(metadata.version("torch").split(".")[:2])
    with (package / "git_version_info_installed.py").open("a", encoding="utf-8") as notes:
        notes.write(f"\ninstalled_ops |= {dict.fromkeys(SHARED, True)}\n")
        notes.write(f"accelerator_name = 'cpu'\ntorch_info |= {{'version': {torch!r}}}\n")


def run_with(place: Path, *steps: tuple[Sequence[str], str]) -> str:
    """Run Python for each step with the release in a folder; return the first problem."""
    paths = os.pathsep.join(filter(None, [str(place), os.environ.get("PYTHONPATH", "")]))
    variables = {"PYTHONPATH": paths, "TORCH_EXTENSIONS_DIR": str(place / "operators")}
    for words, problem in steps:
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
