"""Fingerprints of upstream definitions: hashes of their tokens, without comments and layout.

A seam is only safe for the definition it was written for. Comparing tokens instead of versions
accepts every release in which that definition did not change, and refuses a known release in which
it was patched.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator
from pathlib import Path

_LAYOUT = frozenset(
    (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    )
)
#: Comments, line continuations, strings, words and single characters.
_CPP_TOKENS = re.compile(
    r"""//[^\n]*|/\*.*?\*/|\\\n|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\w+|[^\w\s]""", re.DOTALL
)
#: Start and end of an f-string, since Python 3.12, which splits it into tokens.
_FSTRING_START = getattr(tokenize, "FSTRING_START", None)
_FSTRING_END = getattr(tokenize, "FSTRING_END", None)


def resolve(module: str, attribute: str) -> object:
    """Import `module` and follow the dotted `attribute` in it.

    Raises:
        ImportError: There is no such module.
        AttributeError: There is no such definition.
    """
    target: object = importlib.import_module(module)
    for name in attribute.split("."):
        target = getattr(target, name)
    return target


def fingerprint(module: str, attribute: str) -> str:
    """Return 16 hex digits that change when the code of a definition changes.

    Works on the source text, because a decorator may hide a function behind a wrapper. A name that
    the module only imports is looked up in the module that defines it.

    Args:
        module: A module of the installed release.
        attribute: A function or a class in it, dotted; or an attribute assigned in one, such as
            `Engine.rank` by `self.rank = 0`, which stands for all these statements; or the path of
            a C++ file relative to the module.

    Raises:
        ImportError: There is no such module.
        AttributeError: There is no such definition.
        OSError: There is no source file.
    """
    source = source_of(module, attribute)
    return _hash_cpp(source) if "/" in attribute else _hash_tokens(source)


def source_of(module: str, attribute: str) -> str:
    """Return the text of a definition; arguments and errors are those of `fingerprint`."""
    if "/" in attribute:
        return _path_of(module, attribute).read_text(encoding="utf-8")
    first, _, rest = attribute.partition(".")
    home = home_of(module, attribute)
    source, tree = _parsed(home)
    nodes: list[ast.AST] = [tree]
    for name in (first, *filter(None, rest.split("."))):
        nodes = _children(nodes[0], name, f"{home}.{attribute}")
    return "".join(_text_of(source, node) for node in nodes)


def home_of(module: str, attribute: str) -> str:
    """Return the module that defines a name, which the given module may only import.

    Raises:
        ImportError: There is no such module.
        AttributeError: There is no such definition.
    """
    outermost = resolve(module, attribute.partition(".")[0])
    home: str = getattr(outermost, "__module__", module)
    return home


@functools.lru_cache(maxsize=64)
def file_fingerprint(module: str, path: str = "") -> str:
    """Return 16 hex digits that change when anything in the file of a module changes.

    Args:
        module: A module of the installed release.
        path: Another file, relative to it.

    Raises:
        ImportError: There is no such module.
        OSError: There is no such file.
    """
    return hashlib.sha256(_path_of(module, path).read_bytes()).hexdigest()[:16]


def forget_sources() -> None:
    """Free the parsed sources, about 12 MiB for all seams."""
    file_fingerprint.cache_clear()
    _parsed.cache_clear()
    _assignments.cache_clear()


@functools.lru_cache(maxsize=32)
def _parsed(module: str) -> tuple[str, ast.Module]:
    source = inspect.getsource(importlib.import_module(module))
    return source, ast.parse(source)


def _children(node: ast.AST, name: str, wanted: str) -> list[ast.AST]:
    """Return the definitions of a name in a node, or else the statements that assign it there.

    A property with a setter has two definitions.
    """
    found: list[ast.AST] = [
        child
        for child in getattr(node, "body", ())
        if isinstance(child, ast.ClassDef | ast.FunctionDef) and child.name == name
    ]
    found = found or _assignments(node).get(name, [])
    if not found:
        raise AttributeError(f"{wanted}: no definition of {name}")
    return found


@functools.lru_cache(maxsize=8)
def _assignments(node: ast.AST) -> dict[str, list[ast.AST]]:
    """Return the statements in a node that assign a name, as a variable or as an attribute."""
    found: dict[str, list[ast.AST]] = {}
    for child in ast.walk(node):
        targets = child.targets if isinstance(child, ast.Assign) else []
        if isinstance(child, ast.AnnAssign):
            targets = [child.target]
        for part in (part for target in targets for part in ast.walk(target)):
            if isinstance(part, ast.Attribute | ast.Name) and isinstance(part.ctx, ast.Store):
                name = part.attr if isinstance(part, ast.Attribute) else part.id
                found.setdefault(name, []).append(child)
    return found


def _path_of(module: str, path: str = "") -> Path:
    file = Path(inspect.getfile(importlib.import_module(module)))
    return file.parent / path if path else file


def _hash_cpp(text: str) -> str:
    """Return the fingerprint of a C++ file, which Python's tokenizer cannot read."""
    tokens = [
        found for found in _CPP_TOKENS.findall(text) if not found.startswith(("//", "/*", "\\\n"))
    ]
    return hashlib.sha256("\0".join(tokens).encode()).hexdigest()[:16]


def _text_of(source: str, node: ast.AST) -> str:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(d.lineno for d in decorators)])  # type: ignore[attr-defined]
    lines = source.splitlines()[first - 1 : node.end_lineno]  # type: ignore[attr-defined]
    return textwrap.dedent("\n".join(lines) + "\n")


def _hash_tokens(source: str) -> str:
    digest = hashlib.sha256()
    for text in _texts(source):
        digest.update(text.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def _texts(source: str) -> Iterator[str]:
    """Yield each token's text. An f-string is one token, as in Python before 3.12."""
    lines = source.splitlines(keepends=True)
    depth, begin = 0, (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == _FSTRING_START:
            begin = begin if depth else token.start
            depth += 1
        elif token.type == _FSTRING_END:
            depth -= 1
            if depth == 0:
                yield _between(lines, begin, token.end)
        elif depth == 0 and token.type not in _LAYOUT:
            yield token.string


def _between(lines: list[str], begin: tuple[int, int], end: tuple[int, int]) -> str:
    """Return the text between two places; a place is (line from 1, column from 0)."""
    chosen = lines[begin[0] - 1 : end[0]]
    chosen[-1] = chosen[-1][: end[1]]
    chosen[0] = chosen[0][begin[1] :]
    return "".join(chosen)
