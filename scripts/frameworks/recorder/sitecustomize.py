"""Writes each step's losses and norm to a file, exactly. Python imports this as it starts.

Frameworks print rounded losses, each in its own way. Here `deepspeed.initialize` returns its engine
with `backward` and `step` wrapped, alike with memascend and without. The file is that of RECORD: a
line of JSON for the engine, and one for each step of its optimizer, with numbers in hexadecimal.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

VARIABLE = "RECORD"


def write(**line: Any) -> None:
    """Append a line to the record."""
    with open(os.environ[VARIABLE], "a", encoding="utf-8") as file:
        print(json.dumps(line), file=file)


def exactly(number: Any) -> str:
    """Return a number, or a tensor of one, without rounding."""
    return "none" if number is None else float(number).hex()


def watch(engine: Any) -> None:
    """Record what the engine's passes and steps compute from now on."""
    backward, step = engine.backward, engine.step
    losses: list[str] = []

    def backward_watched(loss: Any, *arguments: Any, **keywords: Any) -> Any:
        losses.append(exactly(loss.detach()))
        return backward(loss, *arguments, **keywords)

    def step_watched(*arguments: Any, **keywords: Any) -> Any:
        is_step = engine.is_gradient_accumulation_boundary()
        result = step(*arguments, **keywords)
        if is_step:
            norm = exactly(engine.get_global_grad_norm())
            write(step=engine.global_steps, losses=losses.copy(), norm=norm)
            losses.clear()
        return result

    engine.backward, engine.step = backward_watched, step_watched
    optimizer = type(engine.optimizer)
    write(optimizer=f"{optimizer.__module__}.{optimizer.__qualname__}")


def watched(initialize: Callable[..., Any]) -> Callable[..., Any]:
    """Return `deepspeed.initialize` with every engine that has an optimizer watched."""

    def initialize_watched(*arguments: Any, **keywords: Any) -> Any:
        made = initialize(*arguments, **keywords)
        if made[1] is not None:
            watch(made[0])
        return made

    return initialize_watched


class Finder:
    """Has `deepspeed.initialize` wrapped once DeepSpeed has been imported."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find DeepSpeed as Python would, and leave everything else to others."""
        if name != "deepspeed":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_wrap(module: ModuleType) -> None:
            run(module)
            vars(module)["initialize"] = watched(vars(module)["initialize"])

        vars(spec.loader)["exec_module"] = run_and_wrap
        return spec


if VARIABLE in os.environ:
    sys.meta_path.insert(0, Finder)
