"""Names that a class takes from nowhere: `self.NAME` that neither it nor a base of ours has."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Class:
    """One class of a source: what it has, uses and derives from."""

    module: str
    name: str
    bases: tuple[str, ...]
    has: frozenset[str]
    uses: frozenset[str]


def classes_in(module: str, tree: ast.AST) -> Iterator[Class]:
    """Yield the classes of a module, also those inside functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            has, uses = _names(node)
            bases = tuple(ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases)
            yield Class(module, node.name, bases, frozenset(has), frozenset(uses))


def borrowed(classes: Iterable[Class]) -> dict[str, str]:
    """Return each class that uses names without having them, with those names.

    Args:
        classes: All classes of ours, which are the bases that count.
    """
    every = list(classes)
    by_name: dict[str, list[Class]] = {}
    for one in every:
        by_name.setdefault(one.name, []).append(one)

    def inherited(one: Class) -> frozenset[str]:
        found = one.has
        for base in one.bases:
            for parent in by_name.get(base, ()):
                found |= inherited(parent) if parent is not one else frozenset()
        return found

    found = {}
    for one in every:
        missing = {name for name in one.uses - inherited(one) if not name.startswith("__")}
        if missing:
            found[f"{one.module}:{one.name}"] = ", ".join(sorted(missing))
    return found


def _names(node: ast.ClassDef) -> tuple[set[str], set[str]]:
    """Return the names that a class has, and those that it uses of `self` or `cls`."""
    has, uses = set[str](), set[str]()
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            has.add(child.name)
        elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            has.add(child.target.id)
        elif isinstance(child, ast.Assign):
            for target in child.targets:
                has |= {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}
        for inner in ast.walk(child):
            if (
                isinstance(inner, ast.Attribute)
                and isinstance(inner.value, ast.Name)
                and inner.value.id in ("self", "cls")
            ):
                (uses if isinstance(inner.ctx, ast.Load) else has).add(inner.attr)
    return has, uses
