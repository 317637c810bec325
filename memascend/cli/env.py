"""`memascend env`: versions and hardware, in lines to paste into an issue.

Imports neither torch nor DeepSpeed, so that it also works where one of them is broken.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
from pathlib import Path
from typing import Any

from memascend.base.units import format_nbytes
from memascend.errors import ConfigError
from memascend.system.gpus import list_gpus
from memascend.system.memory import memory_total
from memascend.system.mounts import SYSFS, drives_below, filesystem_of, read_line
from memascend.version import __version__

PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "trl", "peft")
NOT_FOUND = "not installed"


def env_command_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "env",
        help="versions and hardware, to paste into an issue",
        description="Print versions and hardware, to paste into an issue.",
    )
    parser.add_argument(
        "--path", type=Path, default=Path(), help="folder on the drive to offload to (default: .)"
    )
    parser.set_defaults(run=env_command)


def env_command(args: argparse.Namespace) -> int:
    """Print one line for each fact and return the exit status."""
    for name, value in facts(args.path).items():
        print(f"- {name}: {value}")
    return 0


def facts(path: Path) -> dict[str, str]:
    """Return the facts for an issue, by name; `path` is a folder on the drive to offload to."""
    found = {"memascend": __version__, "Python": platform.python_version()}
    found |= {package: _version(package) for package in PACKAGES}
    found["CUDA of torch"] = _cuda_of_torch()
    gpus = [
        f"{gpu.name}, {format_nbytes(gpu.memory_bytes)}, driver {gpu.driver}" for gpu in list_gpus()
    ]
    found["GPU"] = "; ".join(gpus) or "none found by nvidia-smi"
    found["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    found["CPU cores"] = str(os.cpu_count() or "unknown")
    found["host memory"] = _host_memory()
    return found | {"drive": _drive(path)}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NOT_FOUND


def _cuda_of_torch() -> str:
    """Read the release of CUDA from torch's version file, since importing it takes seconds."""
    spec = importlib.util.find_spec("torch")
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    for folder in folders:
        file = Path(folder, "version.py")
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        if match := re.search(r"^cuda\b[^=\n]*= *['\"]([^'\"]+)", text, re.MULTILINE):
            return match[1]
    return "none" if folders else NOT_FOUND


def _host_memory() -> str:
    try:
        return format_nbytes(memory_total())
    except ConfigError:
        return "unknown"


def _drive(path: Path) -> str:
    if not os.path.isdir(path):
        return f"{path} is not a folder"
    models = [
        f"{name} ({read_line(SYSFS / 'class/block' / name / 'device/model') or 'unknown model'})"
        for name in drives_below(path)
    ]
    free = format_nbytes(shutil.disk_usage(path).free)
    return f"{free} free, {filesystem_of(path)} on {', '.join(models) or 'an unknown drive'}"
