"""The product's files as the tests of the architecture see them: folders, imports, includes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "memascend"

PYTHON = sorted(path.relative_to(ROOT) for path in PACKAGE.rglob("*.py"))
#: The native module, as an import sees it.
CORE = Path("memascend/_core.pyi")
NATIVE = sorted(
    path.relative_to(ROOT) for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cpp", ".hpp")
)

_ROW = re.compile(r"^\| `((?:memascend|csrc)/[^`]*)` \|", re.MULTILINE)
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def floors() -> list[str]:
    """Return the rows of the table of floors, the lowest first."""
    return _ROW.findall((ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8"))


def row_of(file: Path, rows: Iterable[str]) -> str:
    """Return the row that a file belongs to: its own, else its folder's."""
    name, folder = file.as_posix(), f"{file.parent.as_posix()}/"
    return name if name in rows else folder


def parsed(file: Path) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted name of everything imported, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports inside the package are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_files(tree: ast.AST, files: Iterable[Path] = (*PYTHON, CORE)) -> set[Path]:
    """Return which of the files a module imports, or imports something of."""
    known = {file.with_suffix("").as_posix().replace("/", "."): file for file in files}
    known |= {
        name.removesuffix(".__init__"): file
        for name, file in known.items()
        if name.endswith(".__init__")
    }
    found = set()
    for name in imported_names(tree):
        for candidate in (name, name.rpartition(".")[0]):
            if candidate in known:
                found.add(known[candidate])
                break
    return found


def included_files(text: str) -> set[Path]:
    """Return the headers of ours that a C++ source includes."""
    return {Path("csrc", name) for name in _INCLUDE.findall(text)}


def find_cycle(graph: Mapping[Path, set[Path]]) -> list[Path]:
    """Return the files of one cycle, in the order in which they import each other; or nothing."""
    finished: set[Path] = set()

    def follow(file: Path, way: list[Path]) -> list[Path]:
        if file in way:
            return way[way.index(file) :]
        if file in finished:
            return []
        for other in sorted(graph.get(file, ())):
            cycle = follow(other, [*way, file])
            if cycle:
                return cycle
        finished.add(file)
        return []

    return next((cycle for file in graph if (cycle := follow(file, []))), [])
