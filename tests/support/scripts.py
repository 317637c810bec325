"""Programs in scripts/, as modules whose functions tests may call."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def load_script(name: str) -> ModuleType:
    """Load scripts/<name>.py without running it as a program."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    if str(SCRIPTS) not in sys.path:  # as for a program: it may import its neighbours
        sys.path.append(str(SCRIPTS))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
