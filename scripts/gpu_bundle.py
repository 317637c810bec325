#!/usr/bin/env python3
"""Makes one folder with all that a machine with a GPU and no network needs for checks and bench.

In it are packages for that machine's Python, this repository's checks and sources, and a program
that installs and runs them (run.sh). The machine has to have Python, torch with CUDA and a C++
compiler; packages that it lacks are installed from the folder, and those it has stay in use.

The core is a wheel if an interpreter of that Python is here with its headers. In any case the
sources are in the folder: where the wheel is missing or cannot be loaded (an older glibc), the
machine compiles them in a minute or two.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ROOT / "scripts" / "gpu_bundle"
OUT = Path("build/gpu-bundle")
BYTES_MAX = 60_000_000
DEEPSPEED = "deepspeed==0.19.8"
#: Asked for besides the requirements of DeepSpeed and memascend. transformers wants accelerate for
#: every run with DeepSpeed, and accelerate wants torch.
REQUIREMENTS = ("transformers>=5", "pytest>=8,<9.2", "pytest-timeout", "hypothesis>=6.100", "ninja")
WITHOUT_THEIR_OWN = ("accelerate>=1.1",)
#: For the sources of the core, and for installing.
BUILD_REQUIREMENTS = ("pybind11>=3.0,<4", "setuptools>=77", "pip")
#: The machine's own, or in the folder anyway.
NEVER = {"torch", "triton", "deepspeed", "memascend"}
#: glibc versions whose packages any machine of today can load.
MANYLINUX = ("2_28", "2_27", "2_26", "2_24", "2_17", "2_12", "2_5")
#: Of the repository, in git's words.
CHECKS = (
    "benchmarks",
    "configs",
    "pyproject.toml",
    "scripts/gpu_checks",
    "scripts/gpu_smoke.py",
    "tests/__init__.py",
    "tests/conftest.py",
    "tests/kernels",
    "tests/memory",
    "tests/support",
)
SOURCES = ("LICENSE", "MANIFEST.in", "README.md", "csrc", "memascend", "pyproject.toml", "setup.py")


def pip(*arguments: str | Path, python: str = sys.executable, **variables: str) -> None:
    """Run pip.

    Raises:
        SystemExit: It failed; what it printed is on the screen.
    """
    command = [python, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, env={**os.environ, **variables})
    if done.returncode != 0:
        raise SystemExit(f"pip ended with status {done.returncode}: {' '.join(command[1:])}")


# -- packages ------------------------------------------------------------------------------------


def interpreter(version: str, given: str | None = None) -> str | None:
    """Return a Python of this version that has its headers, or None.

    Args:
        version: Such as 3.12.
        given: The only one to look at.
    """
    candidates = [given] if given else [sys.executable, shutil.which(f"python{version}")]
    question = (
        "import os, sys, sysconfig; print('%d.%d' % sys.version_info[:2], "
        "os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h')))"
    )
    for candidate in filter(None, candidates):
        done = subprocess.run([candidate, "-c", question], capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.split() == [version, "True"]:
            return candidate
    return None


def requirements(wheels: Iterable[Path]) -> list[str]:
    """Return the requirements that the wheels state, without extras and without NEVER's."""
    found = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
            metadata = HeaderParser().parsestr(archive.read(name).decode())
        found += [one for one in metadata.get_all("Requires-Dist", []) if "extra ==" not in one]
    return sorted({one for one in found if _name(one) not in NEVER})


def _name(requirement: str) -> str:
    end = next((i for i, c in enumerate(requirement) if c in " <>=!~;[("), len(requirement))
    return requirement[:end].lower().replace("_", "-")


def download(names: Sequence[str], version: str, folder: Path, *options: str) -> None:
    """Download the named packages and all they require, as wheels for that Python."""
    machine = platform.machine()
    command: list[str | Path] = ["download", "--quiet", "--dest", folder, "--only-binary", ":all:"]
    command += ["--python-version", version, "--implementation", "cp"]
    command += ["--abi", f"cp{version.replace('.', '')}", "--abi", "abi3", "--abi", "none"]
    for glibc in MANYLINUX:
        command += ["--platform", f"manylinux_{glibc}_{machine}"]
    command += ["--platform", f"manylinux2014_{machine}", "--platform", f"linux_{machine}"]
    pip(*command, *options, *names)


def make_packages(folder: Path, sources: Path, version: str, python: str | None) -> list[str]:
    """Fill the folder with wheels; return the requirements that a machine has to meet."""
    folder.mkdir()
    pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, DEEPSPEED,
        DS_BUILD_OPS="0")  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "sources"
        shutil.copytree(sources, copy)
        own = folder if python else Path(scratch)
        # Without an interpreter of that version another one tells what memascend requires.
        # The debugger's part of the core is most of it.
        pip("wheel", "--quiet", "--no-deps", "-w", own, copy, python=python or sys.executable,
            LDFLAGS="-Wl,--strip-debug")  # fmt: skip
        wanted = requirements([*folder.glob("deepspeed-*.whl"), *own.glob("memascend-*.whl")])
    wanted = [*wanted, *REQUIREMENTS]
    download([*wanted, *BUILD_REQUIREMENTS], version, folder)
    download(WITHOUT_THEIR_OWN, version, folder, "--no-deps")
    for wheel in folder.glob("*.whl"):
        if _name(wheel.name.split("-")[0]) in ("torch", "triton"):
            raise SystemExit(f"{wheel.name} would take the place of the machine's own")
    return [DEEPSPEED, *wanted, *WITHOUT_THEIR_OWN]


# -- the repository's files ----------------------------------------------------------------------


def copy_tracked(paths: Sequence[str], target: Path) -> None:
    """Copy the files that git knows below the paths, as they are in the work tree."""
    done = subprocess.run(
        ["git", "ls-files", "-z", "--", *paths], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, done.stdout.decode().split("\0")):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target / name)


def commit() -> str:
    """Return the commit that is checked out, and whether files differ from it."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def check_size(folder: Path, bytes_max: int = BYTES_MAX) -> int:
    """Return the bytes of all files.

    Raises:
        SystemExit: They are too many; the largest are named.
    """
    sizes = {file: file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    total = sum(sizes.values())
    if total > bytes_max:
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:5]
        names = ", ".join(f"{file.name} ({sizes[file] / 1e6:.1f} MB)" for file in largest)
        raise SystemExit(
            f"the bundle has {total / 1e6:.1f} MB, more than {bytes_max / 1e6:.0f}; the largest: "
            f"{names}"
        )
    return total


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default="3.12", help="of the machine (default: 3.12)")
    parser.add_argument("--interpreter", help="a Python of that version here, if not on PATH")
    parser.add_argument("--out", type=Path, default=ROOT / OUT, help=f"folder (default: {OUT})")
    options = parser.parse_args(arguments)
    python = interpreter(options.python, options.interpreter)
    if options.interpreter and python is None:
        raise SystemExit(f"{options.interpreter} is no Python {options.python} with its headers")
    if options.out.exists():
        raise SystemExit(f"{options.out} exists; remove it, or name another folder with --out")
    options.out.mkdir(parents=True)
    copy_tracked(CHECKS, options.out / "checks")
    copy_tracked(SOURCES, options.out / "sources")
    wanted = make_packages(options.out / "wheels", options.out / "sources", options.python, python)
    for part in PARTS.iterdir():
        shutil.copy(part, options.out)
    facts = {"python": options.python, "commit": commit(), "requirements": wanted}
    (options.out / "bundle.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    total = check_size(options.out)
    core = "a wheel" if python else f"compiled there: no Python {options.python} with headers here"
    print(f"{options.out}: {total / 1e6:.1f} MB for Python {options.python}; the core is {core}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
