"""The three rules that hold the house: imports point down, no cycles, a test file for each file.

The floors are the rows of the table in docs/ARCHITECTURE.md, the lowest first.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.source_tree import (
    NATIVE,
    PYTHON,
    ROOT,
    find_cycle,
    floors,
    imported_files,
    imported_names,
    included_files,
    parsed,
    row_of,
)

ROWS = floors()
IMPORTS = {file: imported_files(parsed(file)) for file in PYTHON}
INCLUDES = {file: included_files((ROOT / file).read_text(encoding="utf-8")) for file in NATIVE}

#: Product files without a test file of their name, and why.
WITHOUT_TESTS = {
    "csrc/bindings/bind_kernels.cpp": "tests/test_core_surface.py has the whole surface",
    "csrc/bindings/bind_memory.cpp": "tests/test_core_surface.py has the whole surface",
    "csrc/bindings/bind_nvme.cpp": "tests/test_core_surface.py has the whole surface",
    "csrc/bindings/module.cpp": "tests/test_core_surface.py has the whole surface",
    "csrc/kernels/adam_avx2.cpp": "adam_test.cpp compares all with the scalar one",
    "csrc/kernels/adam_avx512.cpp": "adam_test.cpp compares all with the scalar one",
    "csrc/kernels/adam_scalar.cpp": "adam_test.cpp compares all with the scalar one",
    "csrc/kernels/overflow_avx2.cpp": "overflow_test.cpp compares all with the scalar one",
    "csrc/kernels/overflow_avx512.cpp": "overflow_test.cpp compares all with the scalar one",
    "csrc/kernels/overflow_scalar.cpp": "overflow_test.cpp compares all with the scalar one",
    "memascend/base/streams.py": "names alone",
    "csrc/nvme/engine/errors.cpp": "its texts are asserted where they are raised, in tests/nvme",
    "csrc/nvme/engine/factory.cpp": "engine_test.cpp runs one suite on every engine it makes",
    "csrc/nvme/engine/memory.cpp": "engine_test.cpp runs one suite on every engine",
    "csrc/nvme/engine/threads.cpp": "engine_test.cpp runs one suite on every engine",
    "csrc/nvme/store_stats.cpp": "part of the class that store_test.cpp tests",
    "csrc/nvme/transfer/checksums.cpp": "part of the class that lane_test.cpp tests",
    "csrc/nvme/transfer/watch.cpp": "part of the class that lane_test.cpp tests",
    "memascend/deepspeed/seams/fingerprints.py": "written by scripts/update_fingerprints.py",
    "memascend/version.py": "one constant",
}


def as_text(path: Path) -> str:
    return path.as_posix()


def climbs(file: Path, other: Path, rows: list[str]) -> bool:
    """Tell whether an import leads to another row that is not below."""
    own, target = row_of(file, rows), row_of(other, rows)
    return own != target and rows.index(target) > rows.index(own)


def test_every_folder_has_one_row() -> None:
    folders = {row_of(file, ROWS) for file in (*PYTHON, *NATIVE)}
    assert sorted(folders) == sorted(ROWS)


@pytest.mark.parametrize("file", PYTHON, ids=as_text)
def test_imports_point_down(file: Path) -> None:
    assert [as_text(other) for other in IMPORTS[file] if climbs(file, other, ROWS)] == []


def test_data_paths_import_nothing_of_the_plan() -> None:
    """Sizes that both need are in memascend/base/sizes.py."""
    paths = [file for file in PYTHON if as_text(file).startswith("memascend/streaming/")]
    found = {as_text(other) for file in paths for other in IMPORTS[file]}
    assert [other for other in sorted(found) if other.startswith("memascend/plan/")] == []


@pytest.mark.parametrize("file", NATIVE, ids=as_text)
def test_includes_point_down(file: Path) -> None:
    assert [as_text(other) for other in INCLUDES[file] if climbs(file, other, ROWS)] == []


def test_no_file_imports_itself_through_others() -> None:
    assert find_cycle(IMPORTS) == []
    assert find_cycle(INCLUDES) == []


def place_of_tests(file: Path) -> Path:
    """Return where the tests of a product file are."""
    if file.suffix == ".cpp":
        return Path("tests/cpp", *file.parts[1:-1], f"{file.stem}_test.cpp")
    return Path("tests", *file.parts[1:-1], f"test_{file.stem}.py")


def has_own_tests(file: Path) -> bool:
    """Tell whether a file is to have tests: not what only names or declares."""
    return file.name != "__init__.py" and file.suffix != ".hpp"


@pytest.mark.parametrize("file", [*filter(has_own_tests, (*PYTHON, *NATIVE))], ids=as_text)
def test_every_file_has_tests_of_its_name(file: Path) -> None:
    assert (ROOT / place_of_tests(file)).exists() != (as_text(file) in WITHOUT_TESTS)


# -- the rules see what breaks them --------------------------------------------------------------


def test_an_import_that_climbs_is_seen() -> None:
    low, high = Path("memascend/base/units.py"), Path("memascend/config/block.py")
    for text in (
        "from memascend.config.block import parse_block",
        "from memascend.config import block",
        "import memascend.config.block",
        "def late():\n    from memascend.config.block import parse_block",
    ):
        assert imported_files(ast.parse(text)) == {high}, text
    assert climbs(low, high, ROWS)
    assert not climbs(high, low, ROWS)


def test_a_cycle_is_seen() -> None:
    a, b, c = Path("a.py"), Path("b.py"), Path("c.py")
    assert find_cycle({a: {b}, b: {c}, c: set()}) == []
    assert find_cycle({a: {b}, b: {c}, c: {b}}) == [b, c]


def test_a_file_without_tests_is_seen() -> None:
    assert place_of_tests(Path("memascend/nvme/new.py")) == Path("tests/nvme/test_new.py")
    assert place_of_tests(Path("csrc/nvme/space/new.cpp")) == Path(
        "tests/cpp/nvme/space/new_test.cpp"
    )


# -- what outside may be imported where ----------------------------------------------------------


@pytest.mark.parametrize("file", PYTHON, ids=as_text)
def test_only_the_adapters_and_commands_know_deepspeed(file: Path) -> None:
    imports_deepspeed = any(
        name.split(".")[0] == "deepspeed" for name in imported_names(parsed(file))
    )
    assert not imports_deepspeed or file.parts[1] in ("deepspeed", "cli")


def test_autoload_imports_ours_inside_a_function_alone() -> None:
    tree = parsed(Path("memascend/autoload.py"))
    top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert imported_files(ast.Module(body=[*top], type_ignores=[])) == set()
