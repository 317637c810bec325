"""Activation: a post-import hook, so that a training script need not change.

`torch` calls install() through the `torch.backends` entry point while it is itself half imported,
and `import memascend` calls it too. Standard library only; it must never break `import torch`, and
it does nothing until DeepSpeed's config module is imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Sequence

TARGET_MODULE = "deepspeed.runtime.config"


def install() -> None:
    """Arrange that DeepSpeed configs with a `memascend` block are noticed. Idempotent."""
    module = sys.modules.get(TARGET_MODULE)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        _observe(module)
    elif not any(isinstance(finder, _PostImportFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PostImportFinder())


def _observe(module: types.ModuleType) -> None:
    try:
        from memascend.deepspeed.seams.arm import observe

        observe(module)
    except Exception as error:
        # Stock DeepSpeed must stay importable; the warning makes a block that stays unarmed
        # visible.
        warnings.warn(f"memascend could not hook into DeepSpeed: {error!r}", stacklevel=2)


class _PostImportFinder(importlib.abc.MetaPathFinder):
    """A finder that asks the others, and has the target module observed once it is executed."""

    def __init__(self) -> None:
        self._searching = False

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != TARGET_MODULE or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is None or spec.loader is None:
            return None
        spec.loader = _ObservingLoader(spec.loader)
        return spec


class _ObservingLoader(importlib.abc.Loader):
    """A loader that delegates to the real one, then observes."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        _observe(module)

    def __getattr__(self, name: str) -> object:
        # get_source, get_code, is_package, ...: tools such as inspect and linecache ask the loader.
        return getattr(self._loader, name)
