"""The environment: our own variables, the launcher's, and the user's cache folder.

The only module that reads os.environ, besides the commands.
"""

from __future__ import annotations

import os
from pathlib import Path

DISABLE_VARIABLE = "MEMASCEND_DISABLE"
CONFIG_VARIABLE = "MEMASCEND_CONFIG"
TRACE_VARIABLE = "MEMASCEND_TRACE"

#: Variables that set how glibc gives memory back, with the names of the same settings as tunables.
_MALLOC_VARIABLES = {
    "MALLOC_MMAP_THRESHOLD_": "glibc.malloc.mmap_threshold",
    "MALLOC_MMAP_MAX_": "glibc.malloc.mmap_max",
    "MALLOC_TRIM_THRESHOLD_": "glibc.malloc.trim_threshold",
}
_TUNABLES_VARIABLE = "GLIBC_TUNABLES"
_TUNABLES = (*_MALLOC_VARIABLES.values(), "glibc.malloc.hugetlb")


def is_disabled() -> bool:
    """Return True if MEMASCEND_DISABLE asks for stock DeepSpeed, even with a block."""
    return os.environ.get(DISABLE_VARIABLE, "").strip().lower() not in ("", "0", "false", "no")


def block_text() -> str:
    """Return the text of MEMASCEND_CONFIG; empty if it is not set."""
    return os.environ.get(CONFIG_VARIABLE, "").strip()


def trace_folder() -> Path | None:
    """Return the folder for traces of runs, from MEMASCEND_TRACE; None if it is not set."""
    folder = os.environ.get(TRACE_VARIABLE, "").strip()
    return Path(folder) if folder else None


def malloc_settings() -> list[str]:
    """Return the names of variables and tunables by which the user has set glibc's malloc."""
    found = [name for name in _MALLOC_VARIABLES if os.environ.get(name)]
    names = (part.partition("=")[0] for part in os.environ.get(_TUNABLES_VARIABLE, "").split(":"))
    return found + [f"{_TUNABLES_VARIABLE} ({name})" for name in names if name in _TUNABLES]


def local_rank() -> int:
    """Return this process's number among the ranks of this machine; 0 without a launcher."""
    text = os.environ.get("LOCAL_RANK", "")
    return int(text) if text.isdigit() else 0


def local_world_size() -> int:
    """Return the number of ranks on this machine; 1 without a launcher."""
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        text = os.environ.get(name, "")
        if text.isdigit() and int(text) > 0:
            return int(text)
    return 1


def cache_directory() -> Path:
    """Return the folder of cached measurements of this machine; it may not exist."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base, "memascend")
    try:
        return Path.home() / ".cache" / "memascend"
    except RuntimeError:  # a user without a home; others could write to a shared folder
        return Path(os.devnull, "memascend")
