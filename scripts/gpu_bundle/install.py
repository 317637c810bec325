"""Installs the bundle's packages into a folder of their own, without a network.

install.py SITE: packages that this Python has already, in a version that serves, are left alone.
Quick if SITE is complete. Standard library only; the bundle brings its own pip.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
WHEELS = HERE / "wheels"
INSTALL = ("install", "--no-index", "--no-deps", "--no-compile", "--quiet", "--upgrade", "--target")


def pip(*arguments: str | Path, **variables: str) -> str:
    """Run the bundle's pip and return what it printed.

    Raises:
        SystemExit: It failed.
    """
    (program,) = WHEELS.glob("pip-*.whl")
    command = [sys.executable, str(program / "pip"), "--isolated", *map(str, arguments)]
    done = subprocess.run(
        command,
        env={**os.environ, "PIP_CONFIG_FILE": os.devnull, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(f"pip ended with status {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


def missing(requirements: Sequence[str]) -> list[Path]:
    """Return the wheels of what the requirements need and this Python lacks."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        pip("install", "--no-index", "--find-links", WHEELS, "--dry-run", "--quiet",
            "--report", report, *requirements)  # fmt: skip
        plan = json.loads(report.read_text(encoding="utf-8"))["install"]
    names = [one["download_info"]["url"].rsplit("/", 1)[1] for one in plan]
    return [WHEELS / name.replace("%2B", "+") for name in names]


def loads(site: Path) -> bool:
    """Whether the core in the folder can be loaded by this Python on this system."""
    done = subprocess.run(
        [sys.executable, "-c", "import memascend._core"],
        cwd=site,  # not the caller's folder, which may be a checkout without a core
        env={**os.environ, "PYTHONPATH": str(site), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
    )
    return done.returncode == 0


def compile_core(site: Path) -> None:
    """Install memascend from the sources, with the bundle's own tools."""
    print("== compiling the core (a minute or two)", flush=True)
    with tempfile.TemporaryDirectory() as tools:
        builders = [one for name in ("pybind11", "setuptools") for one in WHEELS.glob(f"{name}-*")]
        pip(*INSTALL, tools, *builders)
        pip(*INSTALL, site, "--no-build-isolation", HERE / "sources", PYTHONPATH=tools)
    if not loads(site):
        raise SystemExit("the core was compiled here and cannot be loaded")


def main() -> None:
    """Install what is missing."""
    site = Path(sys.argv[1])
    facts = json.loads((HERE / "bundle.json").read_text(encoding="utf-8"))
    done = site / "bundle.json"
    if done.exists() and json.loads(done.read_text(encoding="utf-8")) == facts:
        return
    if (found := ".".join(map(str, sys.version_info[:2]))) != facts["python"]:
        raise SystemExit(
            f"this bundle is for Python {facts['python']}, {sys.executable} is {found}. Fix: set "
            f"PYTHON, or make another bundle with scripts/gpu_bundle.sh --python {found}"
        )
    if importlib.util.find_spec("torch") is None:
        raise SystemExit(f"{sys.executable} has no torch, which the bundle does not bring")
    print(f"== installing into {site}", flush=True)
    site.mkdir(parents=True, exist_ok=True)
    if wheels := [*missing(facts["requirements"]), *WHEELS.glob("memascend-*.whl")]:
        pip(*INSTALL, site, *wheels)
    if not loads(site):
        compile_core(site)
    done.write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    main()
