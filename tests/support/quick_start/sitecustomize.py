"""Has programs of tests start in half the time. Python imports this as it starts.

torch's optimizers, checkpointing and DeepSpeed mark functions as to be compiled, or as never to be;
either way torch imports its compiler at once: two of the five CPU seconds that a training takes to
begin. Here torch does so when something is compiled. As long as nobody has imported the compiler,
nothing is being compiled, and the marks mean nothing.

While large libraries are imported nothing is garbage, and no collection looks for it.

Products of 16 bits are computed in fp32, which many CPUs do much faster (../products.py).

tests/conftest.py puts this folder before the libraries of programs that tests start. The ranks of
parity, which compile some models, have torch as it is.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

COMPILER = "torch._dynamo"
Function = Callable[..., Any]


def marked_when_it_counts(mark: Function) -> Function:
    """Return `mark`, a decorator that keeps functions from being compiled, to be applied late."""

    @functools.wraps(mark)
    def mark_later(fn: Any = None, *arguments: Any, **keywords: Any) -> Any:
        if fn is None:
            return lambda fn: mark_later(fn, *arguments, **keywords)
        if not isinstance(fn, FunctionType):
            return mark(fn, *arguments, **keywords)

        @functools.wraps(fn)
        def call(*given: Any, **named: Any) -> Any:
            if COMPILER not in sys.modules:
                return fn(*given, **named)
            if not marked:
                marked.append(mark(fn, *arguments, **keywords))
            return marked[0](*given, **named)

        marked: list[Function] = []
        return call

    return mark_later


def compiled_when_called(compile: Function) -> Function:
    """Return `compile`, which compiles functions, as one that does so at their first call."""

    @functools.wraps(compile)
    def compile_later(model: Any = None, **keywords: Any) -> Any:
        if model is None:
            return lambda model: compile_later(model, **keywords)
        if not isinstance(model, FunctionType):
            return compile(model, **keywords)

        @functools.wraps(model)
        def call(*given: Any, **named: Any) -> Any:
            if not compiled:
                compiled.append(compile(model, **keywords))
            return compiled[0](*given, **named)

        compiled: list[Function] = []
        return call

    return compile_later


#: By module: the function in it, and how it changes.
CHANGES = {
    "torch": ("compile", compiled_when_called),
    "torch._compile": ("_disable_dynamo", marked_when_it_counts),
    "torch.compiler": ("disable", marked_when_it_counts),
}


#: Those that take long to import.
LARGE = (
    *("torch", "torch._dynamo", "deepspeed", "transformers", "transformers.trainer"),
    *("transformers.modeling_utils", "accelerate", "datasets", "peft", "trl"),
)


def import_without_collections(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        run(module)
    finally:
        if was_enabled:
            gc.enable()
    if module.__name__ == "deepspeed":  # before there is an engine, whose garbage is to be found
        gc.freeze()


def products() -> ModuleType:
    """Return the module beside this folder that multiplies matrices, of any search path."""
    path = Path(__file__).parents[1] / "products.py"
    spec = spec_from_file_location("tests_support_products", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Imports:
    """Finds the modules above where they are, and has each imported in another way."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in CHANGES and name not in LARGE:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            import_without_collections(run, module)
            if name == "torch":
                products().use_fp32()
            if name in CHANGES:
                attribute, change = CHANGES[name]
                setattr(module, attribute, change(getattr(module, attribute)))

        spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Imports)  # type: ignore[arg-type]
