"""Names of DeepSpeed that our code uses, found in both sources; nothing is imported for it.

A syntax tree has no types. So a name counts as used where ours reads an attribute of it, or asks
`getattr` for it, and DeepSpeed's modules define it while ours do not; the names of torch and of
other libraries are told apart by the module that they are read from. On an `engine` and on a
parameter (`ds_...`) a name counts even where ours defines one like it.
"""

from __future__ import annotations

import ast
import importlib.util
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.source_tree import PACKAGE, PYTHON, parsed

#: The folder with DeepSpeed's surfaces; that of the seams has names as text.
FOLDER, SEAMS = Path("memascend/deepspeed"), Path("memascend/deepspeed/seams")
#: On which a name is DeepSpeed's, whatever ours defines.
ENGINES = ("engine", "_engine", "_stage3", "stage3")
OF_PARAMETERS = "ds_"
ASKING = ("getattr", "hasattr", "setattr")

Names = dict[str, set[str]]


@dataclass
class Upstream:
    """What modules of DeepSpeed define, each name with the dotted places that do.

    Attributes:
        definitions: Functions, methods, properties and classes.
        assigned: Attributes that some definition assigns, by the definition.
    """

    definitions: Names = field(default_factory=lambda: defaultdict(set))
    assigned: Names = field(default_factory=lambda: defaultdict(set))

    def places(self, name: str) -> set[str]:
        """Return every place that gives a name its meaning."""
        return self.definitions.get(name, set()) | self.assigned.get(name, set())


def files_with_surfaces() -> list[Path]:
    return [file for file in PYTHON if file.is_relative_to(FOLDER) and SEAMS not in file.parents]


def imports_of_deepspeed(files: Iterable[Path]) -> set[str]:
    """Return what is imported of DeepSpeed, as "module.name" or, of a module itself, its name."""
    found = set()
    for file in files:
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "deepspeed"}


def attributes_used(files: Iterable[Path], upstream: Upstream) -> Names:
    """Return each attribute that is DeepSpeed's as far as a tree can tell, and its places."""
    own = _defined_by_us()
    found: Names = defaultdict(set)
    for file in files:
        tree = parsed(file)
        others = _modules_of_others(tree)
        for line, receiver, name in _reads(tree):
            root = receiver.split(".")[0].split("(")[0]
            is_theirs = receiver.split(".")[-1] in ENGINES or name.startswith(OF_PARAMETERS)
            if root not in others and (is_theirs or name not in own) and upstream.places(name):
                found[name].add(f"{file}:{line}: {receiver}.{name}")
    return found


def read_upstream(modules: Iterable[str]) -> Upstream:
    """Return what these modules of DeepSpeed define."""
    found = Upstream()
    for module in modules:
        source = source_of(module)
        if source is not None:
            _collect(ast.parse(source.read_text(encoding="utf-8")), module, found)
    return found


def source_of(module: str) -> Path | None:
    """Return a module's file; None for a name that is no module."""
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent.joinpath(*module.split(".")[1:])
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in candidates if file.is_file()), None)


def _collect(node: ast.AST, place: str, found: Upstream) -> None:
    for child in ast.iter_child_nodes(node):
        inner = place
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{place}.{child.name}"
            found.definitions[child.name].add(inner)
        elif isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            found.assigned[child.attr].add(place)
        elif isinstance(child, ast.Assign) and isinstance(node, ast.ClassDef | ast.Module):
            for target in child.targets:
                if isinstance(target, ast.Name):
                    found.assigned[target.id].add(f"{place}.{target.id}")
        _collect(child, inner, found)


def _reads(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield line, receiver and name of every attribute that is read or written."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node.value), node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            asked = [one.value for one in node.args[1:2] if isinstance(one, ast.Constant)]
            if node.func.id in ASKING and asked and isinstance(asked[0], str):
                yield node.lineno, ast.unparse(node.args[0]), asked[0]


def _modules_of_others(tree: ast.AST) -> set[str]:
    """Return the names that a file has by importing something that is not DeepSpeed's."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            home = getattr(node, "module", None)
            for alias in node.names:
                if (home or alias.name).split(".")[0] != "deepspeed":
                    found.add(alias.asname or alias.name.split(".")[0])
    return found


def _defined_by_us() -> set[str]:
    """Return every function, class and field of ours."""
    found = set()
    for path in PACKAGE.rglob("*.py*"):
        if path.suffix not in (".py", ".pyi"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    return found
