"""House rules that a program can check: who assigns to DeepSpeed, who prints, what is how long."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.borrowed_names import borrowed, classes_in
from tests.support.source_tree import NATIVE, PYTHON, ROOT, imported_names, parsed

FILE_LINES_MAX, FUNCTION_LINES_MAX, HEADER_LINES_MAX = 500, 70, 200

SOURCES = sorted(
    path.relative_to(ROOT)
    for folder in ("memascend", "benchmarks", "examples", "scripts", "tests")
    for path in (ROOT / folder).rglob("*.py")
)


def as_text(path: Path) -> str:
    return path.as_posix()


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


@pytest.mark.parametrize(
    "module", [f for f in PYTHON if f.as_posix() != "memascend/deepspeed/seams/arm.py"], ids=as_text
)
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
    "module", [f for f in PYTHON if f.parts[1] not in ("config", "cli")], ids=as_text
)
def test_only_config_and_commands_read_the_environment(module: Path) -> None:
    tree = parsed(module)
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {name.split(".")[-1] for name in imported_names(tree)}
    assert not used & {"environ", "getenv", "putenv", "environb"}


@pytest.mark.parametrize("module", [f for f in PYTHON if f.parts[1] != "cli"], ids=as_text)
def test_only_commands_print(module: Path) -> None:
    calls = [node.func for node in ast.walk(parsed(module)) if isinstance(node, ast.Call)]
    assert not [call for call in calls if isinstance(call, ast.Name) and call.id == "print"]


def writes_over(tree: ast.AST) -> list[int]:
    """Lines that open a file by its name, to write to what has the name already."""
    lines = []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        is_method = isinstance(call.func, ast.Attribute)
        name = call.func.attr if isinstance(call.func, ast.Attribute) else root_name(call.func)
        modes = call.args[:1] if is_method else call.args[1:2]
        modes = [*modes, *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
        texts = [str(mode.value) for mode in modes if isinstance(mode, ast.Constant)]
        opens = name == "open" and any(re.fullmatch("[wa]b?|rb?[+]b?", text) for text in texts)
        is_new = bool(call.args) and root_name(call.args[0]) in ("open_new", "open_anew")
        if name in ("write_text", "write_bytes") or (opens and not is_new):
            lines.append(call.lineno)
    return lines


@pytest.mark.parametrize("module", PYTHON, ids=as_text)
def test_no_file_is_written_over_that_a_link_may_have_put_there(module: Path) -> None:
    if module.as_posix() != "memascend/system/files.py":
        assert writes_over(parsed(module)) == []


def test_the_check_for_files_written_over_sees_them() -> None:
    tree = ast.parse(
        "path.write_text('')\n"
        "path.open('w')\n"
        "open(path, mode='wb')\n"
        "open(path, 'r+b')\n"
        "open(open_anew(path), 'w', encoding='utf-8')\n"
        "open(path, 'rb')\n"
        "path.open('xb')\n"
    )
    assert writes_over(tree) == [1, 2, 3, 4]


@pytest.mark.parametrize("source", SOURCES, ids=as_text)
def test_python_files_and_functions_are_short(source: Path) -> None:
    text = (ROOT / source).read_text(encoding="utf-8")
    assert text.count("\n") <= FILE_LINES_MAX
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno + 1 <= FUNCTION_LINES_MAX, node.name


#: What tests compile.
NATIVE_OF_TESTS = sorted(
    path.relative_to(ROOT)
    for path in (ROOT / "tests").rglob("*")
    if path.suffix in (".cpp", ".hpp")
)


@pytest.mark.parametrize("source", [*NATIVE, *NATIVE_OF_TESTS], ids=as_text)
def test_native_files_are_short(source: Path) -> None:
    lines = (ROOT / source).read_text(encoding="utf-8").count("\n")
    assert lines <= (HEADER_LINES_MAX if source.suffix == ".hpp" else FILE_LINES_MAX)


# -- classes that can be read alone --------------------------------------------------------------

#: Folders in which a class has every name that it uses: composition, no tower of mixins.
COMPOSED = ("memascend/deepspeed/", "memascend/streaming/")


def test_a_class_has_every_name_that_it_uses_of_itself() -> None:
    """Also the one subclass of DeepSpeed's optimizer: what it needs of that is in `Upstream`."""
    classes = [one for file in PYTHON for one in classes_in(file.as_posix(), parsed(file))]
    found = borrowed(classes)
    assert {where: names for where, names in found.items() if where.startswith(COMPOSED)} == {}


def test_the_check_for_borrowed_names_sees_them() -> None:
    tree = ast.parse(
        "class Base:\n"
        "    noted: int\n"
        "    def __init__(self): self.made = 1\n"
        "class Mixin(Base, Foreign):\n"
        "    limit = 3\n"
        "    @property\n"
        "    def own(self): return self.made + self.limit + self.noted + self._theirs\n"
        "    def call(self): return lambda: self.own + self.of_foreign()\n"
    )
    assert borrowed(classes_in("here.py", tree)) == {"here.py:Mixin": "_theirs, of_foreign"}


# -- one verb for one act ------------------------------------------------------------------------

#: Where a verb has one meaning (CONTRIBUTING.md, "Verbs").
DATA_PATHS = tuple(
    f"memascend/{folder}/"
    for folder in ("streaming", "transfer", "deepspeed/optimizer", "deepspeed/parameters")
)
#: Methods named by DeepSpeed, or after its own.
THEIRS = {"synchronize_reads", "synchronize_writes", "_mark_absent"}


def unused_verbs() -> set[str]:
    """Return the verbs of the table's last column, each with underscores."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("\n## Verbs\n")[2]
    columns = re.findall(
        r"^\|[^|]+\|[^|]+\| ([a-z ,]+) \|$", text.partition("\n## ")[0], re.MULTILINE
    )
    verbs = {verb.replace(" ", "_") for column in columns for verb in column.split(", ")}
    return verbs - {"not"}


def methods_with(verbs: set[str], tree: ast.AST) -> list[str]:
    """Return the methods whose names begin with one of the verbs; a property is a noun."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    methods = [one for node in classes for one in node.body if isinstance(one, ast.FunctionDef)]
    return [
        one.name
        for one in methods
        if any(f"{one.name.lstrip('_')}_".startswith(f"{verb}_") for verb in verbs)
        and not any(root_name(by) == "property" for by in one.decorator_list)
    ]


@pytest.mark.parametrize(
    "module", [file for file in PYTHON if file.as_posix().startswith(DATA_PATHS)], ids=as_text
)
def test_a_method_has_the_verb_that_others_have_for_the_same(module: Path) -> None:
    assert set(methods_with(unused_verbs(), parsed(module))) <= THEIRS


def test_the_check_for_verbs_sees_them() -> None:
    assert {"forget", "store", "read_ahead"} < unused_verbs()
    tree = ast.parse(
        "class Slots:\n"
        "    def _forget(self): ...\n"
        "    def stored(self): ...\n"
        "    @property\n"
        "    def store(self): ...\n"
    )
    assert methods_with(unused_verbs(), tree) == ["_forget"]
