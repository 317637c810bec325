"""What the native core shows: to Python its stub, to the linker one symbol, to the loader libc."""

from __future__ import annotations

import ast
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from memascend import _core

STUB = Path(__file__).resolve().parents[1] / "memascend" / "_core.pyi"
SYSTEM_LIBRARIES = ("libstdc++", "libm", "libgcc_s", "libc", "ld-linux", "libpthread")
# Of the buffer protocol; Python shows them from 3.12 on.
BUFFER_METHODS = {"__buffer__", "__release_buffer__"}
OURS_OR_PYBIND = ("9memascend", "8pybind11")


def stub_definitions() -> dict[str, ast.ClassDef | ast.FunctionDef]:
    tree = ast.parse(STUB.read_text(encoding="utf-8"))
    return {
        node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }


def stub_members(definition: ast.ClassDef) -> set[str]:
    members = set()
    for node in definition.body:
        if isinstance(node, ast.FunctionDef):
            members.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            members.add(node.target.id)
    return members - BUFFER_METHODS - {"__init__"}


def public(names: list[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def test_stub_and_module_have_the_same_names() -> None:
    assert set(stub_definitions()) == public(dir(_core))


@pytest.mark.parametrize(
    "name", [name for name, node in stub_definitions().items() if isinstance(node, ast.ClassDef)]
)
def test_stub_and_class_have_the_same_members(name: str) -> None:
    definition = stub_definitions()[name]
    assert isinstance(definition, ast.ClassDef)
    assert stub_members(definition) == public(dir(getattr(_core, name)))


@pytest.mark.parametrize(
    "name", [name for name, node in stub_definitions().items() if isinstance(node, ast.ClassDef)]
)
def test_stub_says_which_classes_python_may_construct(name: str) -> None:
    definition = stub_definitions()[name]
    assert isinstance(definition, ast.ClassDef)
    in_stub = any(
        isinstance(node, ast.FunctionDef) and node.name == "__init__" for node in definition.body
    )
    documented = getattr(_core, name).__init__.__doc__ or ""
    assert in_stub == documented.startswith("__init__(self")


@pytest.mark.parametrize(
    "name", [name for name, node in stub_definitions().items() if isinstance(node, ast.FunctionDef)]
)
def test_stub_and_function_have_the_same_parameters(name: str) -> None:
    definition = stub_definitions()[name]
    assert isinstance(definition, ast.FunctionDef)
    signature = (getattr(_core, name).__doc__ or "").splitlines()[0]
    for argument in definition.args.kwonlyargs:
        assert f"{argument.arg}:" in signature
    assert signature.count(":") == len(definition.args.kwonlyargs)


# -- the shared object ---------------------------------------------------------------------------


class SharedObject:
    """The dynamic section and symbols of a 64-bit little-endian ELF file."""

    DT_NEEDED = 1
    SECTION_DYNAMIC, SECTION_DYNSYM = 6, 11

    def __init__(self, path: Path) -> None:
        self._bytes = path.read_bytes()
        if self._bytes[:6] != b"\x7fELF\x02\x01":
            pytest.skip(f"{path.name} is not a 64-bit little-endian ELF file")
        (table,) = struct.unpack_from("<Q", self._bytes, 40)
        entry_bytes, count = struct.unpack_from("<HH", self._bytes, 58)
        # name, type, flags, address, offset, size, link, info, alignment, entry size
        self._sections = [
            struct.unpack_from("<IIQQQQIIQQ", self._bytes, table + index * entry_bytes)
            for index in range(count)
        ]

    def needed(self) -> list[str]:
        rows = self._rows(self.SECTION_DYNAMIC, "<qQ")
        return [self._text(link, value) for link, (tag, value) in rows if tag == self.DT_NEEDED]

    def exported(self) -> list[tuple[str, bool]]:
        """Defined symbols that other objects see, and whether each is strong."""
        symbols = []
        for link, (name, info, other, section, _, _) in self._rows(self.SECTION_DYNSYM, "<IBBHQQ"):
            is_visible = other & 3 in (0, 3)
            if section != 0 and is_visible and info >> 4 != 0:
                symbols.append((self._text(link, name), info >> 4 == 1))
        return symbols

    def _rows(self, kind: int, layout: str) -> Iterator[tuple[int, tuple[int, ...]]]:
        for _, section_kind, _, _, offset, size, link, _, _, _ in self._sections:
            if section_kind == kind:
                for row in struct.iter_unpack(layout, self._bytes[offset : offset + size]):
                    yield link, row

    def _text(self, link: int, offset: int) -> str:
        start = self._sections[link][4] + offset
        return self._bytes[start : self._bytes.index(b"\0", start)].decode()


@pytest.fixture(scope="module")
def core_file() -> SharedObject:
    return SharedObject(Path(_core.__file__))


def test_core_needs_only_system_libraries(core_file: SharedObject) -> None:
    needed = core_file.needed()
    assert "libc.so.6" in needed
    assert [name for name in needed if not name.startswith(SYSTEM_LIBRARIES)] == []


def test_core_exports_its_entry_and_nothing_else_of_ours(core_file: SharedObject) -> None:
    """Weak symbols are the standard library's templates, which every C++ library exports."""
    exported = core_file.exported()
    assert [name for name, strong in exported if strong] == ["PyInit__core"]
    # _ZN9memascend..., _ZNK9memascend..., _ZTIN9memascend...: what is named in a namespace of ours.
    begins = tuple(
        f"_Z{prefix}{space}"
        for prefix in ("N", "NK", "TIN", "TSN", "TVN", "GVN", "GVZN", "ZN", "ZNK")
        for space in OURS_OR_PYBIND
    )
    assert [name for name, _ in exported if name.startswith(begins)] == []


# -- without torch -------------------------------------------------------------------------------

WITHOUT_TORCH = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "deepspeed"):
            raise ImportError(f"{name} must not be needed")

sys.meta_path.insert(0, Blocker())
import memascend, memascend.config.block, memascend.base.units, memascend.errors
import memascend.memory.allocator, memascend.memory.pool, memascend.nvme.store
import memascend.system.numa, memascend.cli.main
assert memascend.config.block.parse_block({}).enabled
assert memascend.base.units.parse_nbytes("1 MiB") == 1 << 20
assert not {"torch", "deepspeed"} & set(sys.modules)
"""


def test_package_imports_where_torch_and_deepspeed_are_missing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
