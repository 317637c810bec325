"""What counts as a change of an upstream definition, and what does not."""

from __future__ import annotations

import importlib
import itertools
import shutil
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memascend.deepspeed.seams import fingerprint as fingerprints
from memascend.deepspeed.seams.fingerprint import (
    file_fingerprint,
    fingerprint,
    forget_sources,
    home_of,
    resolve,
)

PLAIN = """
class Swapper:
    def swap(self, tensors):
        for tensor in tensors:
            self.write(tensor, 1)
"""

Module = Callable[[str], str]
_numbers = itertools.count()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    """Makes an importable module of some source text and gives its name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = []

    def make(source: str) -> str:
        names.append(f"upstream_{next(_numbers)}")
        (tmp_path / f"{names[-1]}.py").write_text(source)
        importlib.invalidate_caches()
        return names[-1]

    yield make
    for name in names:
        sys.modules.pop(name, None)


def test_comments_blank_lines_and_indentation_are_not_a_change(module: Module) -> None:
    other = """
# moved down
class Swapper:  # a comment

        def swap( self,tensors ):
            # another
            for tensor in tensors:

                self.write(tensor,
                           1)
"""
    assert fingerprint(module(PLAIN), "Swapper") == fingerprint(module(other), "Swapper")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("1)", "2)"),
        ("self.write", "self.read"),
        ("tensors):\n", "tensors, wait=True):\n"),
        ("for tensor in tensors:\n            self", "if tensors:\n            self"),
    ],
)
def test_a_changed_token_is_a_change(module: Module, old: str, new: str) -> None:
    changed = PLAIN.replace(old, new)
    assert changed != PLAIN
    one, other = module(PLAIN), module(changed)
    assert fingerprint(one, "Swapper.swap") != fingerprint(other, "Swapper.swap")
    assert fingerprint(one, "Swapper") != fingerprint(other, "Swapper")


#: f-strings of every kind, which Python takes apart from 3.12 on.
FORMATTED = """
class Swapper:
    def swap(self, number, names):
        plain = "a" "b"
        one = f"{number} of {len(names)}: {{{names[0]!r:>{number}}}}" f'{number=}'
        return rf"{one}\\n" + f'''
            {", ".join(f"<{name}>" for name in names)}  # no comment
        ''' + plain
"""


def other_pythons() -> list[str]:
    """Return the interpreters of other versions that are at hand."""
    named = [shutil.which(f"python3.{minor}") for minor in range(10, 16)]
    pyenv = Path.home() / ".pyenv" / "versions"
    return [path for path in named if path] + [str(p) for p in pyenv.glob("3.1?.*/bin/python")]


def test_every_python_gives_the_same_fingerprint() -> None:
    expected = fingerprints._hash_tokens(FORMATTED)
    program = (
        "import runpy, sys; name, text = sys.argv[1:]; "
        "print('%d.%d' % sys.version_info[:2], runpy.run_path(name)['_hash_tokens'](text))"
    )
    found: dict[str, str] = {}
    for python in other_pythons():
        command = [python, "-c", program, str(fingerprints.__file__), FORMATTED]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:  # a name may lead to a Python that is not installed
            version, digest = done.stdout.split()
            found[version] = digest
    if not found:
        pytest.skip("no other Python is installed")
    assert found == dict.fromkeys(found, expected)


def test_the_parts_of_an_f_string_are_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    source = 'f"a{b}c"\n'
    expected = fingerprints._hash_tokens(source)
    start, middle, end = 901, 902, 903
    monkeypatch.setattr(fingerprints, "_FSTRING_START", start)
    monkeypatch.setattr(fingerprints, "_FSTRING_END", end)

    def taken_apart(readline: Callable[[], str]) -> Iterator[tokenize.TokenInfo]:
        line, column = readline(), 0
        for kind, text in (
            (start, 'f"'),
            (middle, "a"),
            (tokenize.OP, "{"),
            (tokenize.NAME, "b"),
            (tokenize.OP, "}"),
            (middle, "c"),
            (end, '"'),
        ):
            begin, column = column, column + len(text)
            yield tokenize.TokenInfo(kind, text, (1, begin), (1, column), line)

    monkeypatch.setattr(fingerprints.tokenize, "generate_tokens", taken_apart)
    assert fingerprints._hash_tokens(source) == expected


def test_a_change_elsewhere_in_the_module_is_none(module: Module) -> None:
    longer = "import os\n" + PLAIN + "\n    def other(self):\n        return os.name\n"
    one, other = module(PLAIN), module(longer)
    assert fingerprint(one, "Swapper.swap") == fingerprint(other, "Swapper.swap")
    assert fingerprint(one, "Swapper") != fingerprint(other, "Swapper")


DECORATED = """
def logged(function):
    def wrapper(*arguments):
        return function(*arguments)
    return wrapper

class Swapper:
    @logged
    def swap(self):
        return {body}
"""


def test_a_decorator_does_not_hide_a_change(module: Module) -> None:
    one, other = module(DECORATED.format(body=1)), module(DECORATED.format(body=2))
    swaps = [resolve(name, "Swapper.swap") for name in (one, other)]
    assert swaps[0].__code__.co_code == swaps[1].__code__.co_code  # type: ignore[attr-defined]
    assert fingerprint(one, "Swapper.swap") != fingerprint(other, "Swapper.swap")


def test_another_decorator_is_a_change(module: Module) -> None:
    one = module(DECORATED.format(body=1))
    other = module(DECORATED.format(body=1).replace("    @logged\n", "    @staticmethod\n"))
    assert fingerprint(one, "Swapper.swap") != fingerprint(other, "Swapper.swap")


def test_an_imported_name_is_followed_to_its_definition(module: Module) -> None:
    home = module(PLAIN)
    user = module(f"from {home} import Swapper\n")
    assert fingerprint(user, "Swapper.swap") == fingerprint(home, "Swapper.swap")


def test_a_definition_that_is_gone_is_said_to_be_missing(module: Module) -> None:
    name = module(PLAIN)
    with pytest.raises(AttributeError):
        fingerprint(name, "Reader")
    with pytest.raises(AttributeError, match=r"Swapper\.flush.*no definition of flush"):
        fingerprint(name, "Swapper.flush")
    with pytest.raises(ImportError):
        fingerprint("no_such_upstream_module", "Swapper")


def test_a_method_that_is_only_inherited_is_missing(module: Module) -> None:
    """It may be defined anywhere; where it is defined is what must be named."""
    name = module(PLAIN + "\nclass Child(Swapper):\n    pass\n")
    with pytest.raises(AttributeError, match="no definition of swap"):
        fingerprint(name, "Child.swap")


def test_parsed_sources_are_given_back(module: Module) -> None:
    fingerprint(module(PLAIN), "Swapper")
    assert fingerprints._parsed.cache_info().currsize > 0
    forget_sources()
    assert fingerprints._parsed.cache_info().currsize == 0


# -- what is no function or class ------------------------------------------------------------------


ENGINE = """
KEY = "rank"

class Engine:
    def __init__(self):
        self.rank, self.world = 0, 1
        if self.world > 1:
            self.rank = ask()
        self.name: str = KEY
"""


@pytest.mark.parametrize("attribute", ["KEY", "Engine.rank", "Engine.name"])
def test_what_is_assigned_is_known_by_the_statements_that_assign_it(
    module: Module, attribute: str
) -> None:
    before = fingerprint(module(ENGINE), attribute)
    other = ENGINE.replace("ask()", "ask_first()").replace("KEY =", "KEY = 0 or")
    other = other.replace(": str = KEY", ": str = KEY + KEY")
    assert fingerprint(module(other), attribute) != before
    moved = ENGINE.replace("    def __init__", "    def _begin").replace("world", "size")
    assert (fingerprint(module(moved), attribute) == before) == (attribute != "Engine.rank")


def test_what_is_assigned_nowhere_is_missing(module: Module) -> None:
    with pytest.raises(AttributeError, match="no definition of local_rank"):
        fingerprint(module(ENGINE), "Engine.local_rank")


def test_a_property_is_known_by_its_setter_too(module: Module) -> None:
    source = """
class Scaler:
    @property
    def scale(self):
        return 1
    @scale.setter
    def scale(self, value):
        self.given = value
"""
    one, other = module(source), module(source.replace("= value", "= 2 * value"))
    assert fingerprint(one, "Scaler.scale") != fingerprint(other, "Scaler.scale")


HEADER = """
#define SPAN(a) \\
    a
/* Adam */
inline void step(size_t step) { power *= beta; }  // upward
const char* name = "a // b";
"""


@pytest.mark.parametrize(
    ("old", "new", "is_same"),
    [
        ("/* Adam */", "// AdamW\n/* in\nlines */", True),
        ("{ power *= beta; }", "{\n  power *= beta;\n}", True),
        ("\\\n    a", "a", True),
        ("*= beta", "= pow(beta, step)", False),
        ("power *=", "pow er *=", False),
        ("a // b", "a // c", False),
        ("a // b", "a //  b", False),
    ],
)
def test_of_a_file_of_cpp_comments_and_layout_are_not_a_change(
    module: Module, tmp_path: Path, old: str, new: str, is_same: bool
) -> None:
    name = module("")
    (tmp_path / "includes").mkdir()
    file = tmp_path / "includes" / "adam.h"
    file.write_text(HEADER)
    before = fingerprint(name, "includes/adam.h")
    assert old in HEADER
    file.write_text(HEADER.replace(old, new))
    assert (fingerprint(name, "includes/adam.h") == before) == is_same


def test_a_file_that_is_gone_is_said_to_be_missing(module: Module) -> None:
    with pytest.raises(OSError, match=r"adam\.h"):
        fingerprint(module(""), "includes/adam.h")


def test_any_other_byte_in_a_file_is_another_file(module: Module) -> None:
    one, same, commented = module(PLAIN), module(PLAIN), module(f"{PLAIN}# a comment\n")
    assert file_fingerprint(one) == file_fingerprint(same) != file_fingerprint(commented)


def test_a_name_is_at_home_where_it_is_defined(module: Module) -> None:
    defining = module(PLAIN)
    importing = module(f"from {defining} import Swapper\n")
    assert home_of(importing, "Swapper.swap") == defining == home_of(defining, "Swapper")
