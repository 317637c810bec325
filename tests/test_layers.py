"""The layer rule and the house rules that a program can check: who imports what, and how long."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "memascend"
FILE_LINES_MAX, FUNCTION_LINES_MAX, HEADER_LINES_MAX = 400, 70, 200

FLOORS = (
    {"_core", "errors", "json_text", "units", "version", "autoload"},
    {"limit", "smart", "wear", "verify", "config_errors", "config_volumes"},
    {"volume_header", "volume_signatures"},
    {"volume_device"},
    {"config", "tensors", "architectures", "footprint", "manifest", "saving_folder"},
    {"shapes", "plan_request"},
    {"plan_verify"},
    {"plan_knobs"},
    {"plan", "plan_stock"},
    {"ledger"},
    {"allocator", "budget", "pool", "nvme", "numa", "overflow", "overflow_triton", "sampling"},
    {"mapped_files", "resident", "volume_speed"},
    {"volume_weights"},
    {"volumes"},
    {"streaming"},
    {"runtime"},
    {"deepspeed"},
    {"cli"},
)
# Who may look sideways or up, each for one reason.
EXCEPTIONS = {
    ("units", "errors"),  # the root of the family
    ("pool", "allocator"),  # a pool is stacked on an allocator
    ("overflow", "overflow_triton"),  # the same feature on the device
    ("autoload", "deepspeed"),  # deferred until DeepSpeed itself is imported
}
NATIVE_FLOORS = ({"base"}, {"os"}, {"memory", "nvme", "kernels"}, {"bindings"})

MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
NATIVE = sorted(
    path.relative_to(ROOT) for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cpp", ".hpp")
)
SOURCES = sorted(
    path.relative_to(ROOT)
    for folder in ("memascend", "benchmarks", "scripts", "tests")
    for path in (ROOT / folder).rglob("*.py")
)


def as_text(path: Path) -> str:
    return path.as_posix()


def parsed(module: Path) -> ast.Module:
    return ast.parse((PACKAGE / module).read_text(encoding="utf-8"))


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything imported, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports inside the package are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def floor_of(unit: str, floors: tuple[set[str], ...]) -> int:
    found = [index for index, units in enumerate(floors) if unit in units]
    assert found, f"{unit} has no floor: add it to FLOORS"
    return found[0]


def unit_of(module: Path) -> str:
    return module.parts[0].removesuffix(".py")


@pytest.mark.parametrize("module", [m for m in MODULES if m.stem != "__init__"], ids=as_text)
def test_modules_import_downward_only(module: Path) -> None:
    unit = unit_of(module)
    for name in imported_names(parsed(module)):
        parts = name.split(".")
        if parts[0] != "memascend":
            continue
        other = parts[1]
        if other == unit or (unit, other) in EXCEPTIONS:
            continue
        assert floor_of(other, FLOORS) < floor_of(unit, FLOORS), f"{unit} imports {other}"


def test_importing_the_package_stays_on_the_ground_floor() -> None:
    units = {
        name.split(".")[1]
        for name in imported_names(parsed(Path("__init__.py")))
        if name.startswith("memascend.")
    }
    assert units <= FLOORS[0]


@pytest.mark.parametrize("module", MODULES, ids=as_text)
def test_only_the_adapters_and_commands_know_deepspeed(module: Path) -> None:
    imports_deepspeed = any(
        name.split(".")[0] == "deepspeed" for name in imported_names(parsed(module))
    )
    assert not imports_deepspeed or unit_of(module) in ("deepspeed", "cli")


def test_autoload_imports_ours_inside_a_function_alone() -> None:
    tree = parsed(Path("autoload.py"))
    top = ast.Module(
        body=[n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)], type_ignores=[]
    )
    assert [name for name in imported_names(top) if name.startswith("memascend")] == []


@pytest.mark.parametrize("source", NATIVE, ids=as_text)
def test_native_sources_include_downward_only(source: Path) -> None:
    folder = source.parts[1]
    text = (ROOT / source).read_text(encoding="utf-8")
    for included in re.findall(r'^#include "([^"]+)"', text, re.MULTILINE):
        other = included.split("/")[0]
        if other != folder:
            assert floor_of(other, NATIVE_FLOORS) < floor_of(folder, NATIVE_FLOORS), included


# -- who assigns to DeepSpeed --------------------------------------------------------------------


def deepspeed_names(tree: ast.AST) -> set[str]:
    """Names bound by importing DeepSpeed or something of it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                alias.asname or alias.name.split(".")[0]
                for alias in node.names
                if alias.name.split(".")[0] == "deepspeed"
            }
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "deepspeed":
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def root_name(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def assignments_to(tree: ast.AST, names: set[str]) -> list[int]:
    """Lines that assign to, delete from or setattr one of the names."""
    lines = []
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = list(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and root_name(node.func) in ("setattr", "delattr"):
            targets = [ast.Attribute(value=node.args[0], attr="")]
        for target in targets:
            if isinstance(target, ast.Attribute | ast.Subscript) and root_name(target) in names:
                lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("module", [m for m in MODULES if m.stem != "seams"], ids=as_text)
def test_only_seams_assigns_to_deepspeed(module: Path) -> None:
    tree = parsed(module)
    assert assignments_to(tree, deepspeed_names(tree)) == []
    # A computed attribute could reach anything.
    calls = [root_name(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)]
    assert "setattr" not in calls


def test_the_check_for_assignments_sees_them() -> None:
    tree = ast.parse(
        "from deepspeed.runtime import engine\n"
        "import deepspeed\n"
        "engine.Engine.step = None\n"
        "setattr(deepspeed.zero, 'Init', None)\n"
        "local = engine\n"
    )
    assert assignments_to(tree, deepspeed_names(tree)) == [3, 4]


# -- house rules ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module", [m for m in MODULES if unit_of(m) not in ("config", "cli")], ids=as_text
)
def test_only_config_and_commands_read_the_environment(module: Path) -> None:
    tree = parsed(module)
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {name.split(".")[-1] for name in imported_names(tree)}
    assert not used & {"environ", "getenv", "putenv", "environb"}


@pytest.mark.parametrize("module", [m for m in MODULES if unit_of(m) != "cli"], ids=as_text)
def test_only_commands_print(module: Path) -> None:
    calls = [node.func for node in ast.walk(parsed(module)) if isinstance(node, ast.Call)]
    assert not [call for call in calls if isinstance(call, ast.Name) and call.id == "print"]


@pytest.mark.parametrize("source", SOURCES, ids=as_text)
def test_python_files_and_functions_are_short(source: Path) -> None:
    text = (ROOT / source).read_text(encoding="utf-8")
    assert text.count("\n") <= FILE_LINES_MAX
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno + 1 <= FUNCTION_LINES_MAX, node.name


@pytest.mark.parametrize("source", NATIVE, ids=as_text)
def test_native_files_are_short(source: Path) -> None:
    lines = (ROOT / source).read_text(encoding="utf-8").count("\n")
    assert lines <= (HEADER_LINES_MAX if source.suffix == ".hpp" else FILE_LINES_MAX)
