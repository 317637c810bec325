"""Compiles the device once for every content of its files and version of torch.

`python -m tests.device.emulator.build` does it ahead, half a minute; the result lies with
DeepSpeed's compiled operators. The library plays libcuda.so.1, too, as far as registering memory
goes: whoever looks for one finds it by its SONAME.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

NATIVE = Path(__file__).resolve().parent / "native"
ROOT = NATIVE.parents[3]
COMPILER_OPTIONS = ["-O1", "-std=c++20"]
#: The headers of later ones may differ, earlier ones lack some.
TORCH_MIN = (2, 13)


def why_not() -> str | None:
    """Say why the device cannot be had here."""
    found = tuple(int(part) for part in version("torch").split(".")[:2])
    if found < TORCH_MIN:
        return f"the emulated device needs torch {TORCH_MIN[0]}.{TORCH_MIN[1]} or later"
    return None


def build() -> Path:
    """Compile what is not there yet; return the library. Other processes wait for one that does."""
    library = folder() / f"{folder().name}.so"
    folder().mkdir(parents=True, exist_ok=True)
    with (folder() / "building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    """Put the library in its place once it is whole."""
    from torch.utils import cpp_extension

    print("== compiling the emulated device (half a minute)", flush=True)
    os.environ.setdefault("MAX_JOBS", "1")
    made = library.parent / "made"
    made.mkdir(exist_ok=True)
    cpp_extension.load(
        name=library.stem,
        sources=[str(NATIVE / "module.cpp")],
        build_directory=str(made),
        extra_cflags=COMPILER_OPTIONS,
        extra_ldflags=["-Wl,-soname,libcuda.so.1"],
        is_python_module=False,
    )
    os.replace(made / library.name, library)


def folder() -> Path:
    digest = hashlib.sha256(f"{version('torch')} {sys.version} {COMPILER_OPTIONS}".encode())
    for path in sorted(NATIVE.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR", ROOT / ".venv" / "torch_extensions")
    return Path(extensions) / f"emulated_device_{digest.hexdigest()[:16]}"


def load() -> ModuleType:
    library = build()
    specification = importlib.util.spec_from_file_location(library.stem, library)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


if __name__ == "__main__":
    if why_not() is None:
        build()
