"""Recognising upstream definitions: a hash of their tokens, comments and layout dropped.

A seam is only safe over the definition it was written for. Comparing tokens instead of versions
accepts every release in which that definition did not change, and refuses a changed one inside a
known release.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import io
import textwrap
import tokenize

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
    """Return 16 hex digits that change when the code of a function or class changes.

    Works on the source text, because decorators may hide a function behind a wrapper that shows
    nothing of it. A name that the module merely imported is followed to where it is defined.

    Raises:
        ImportError: There is no such module.
        AttributeError: There is no such definition.
        OSError: The source is not at hand.
    """
    first, _, rest = attribute.partition(".")
    outermost = resolve(module, first)
    home = getattr(outermost, "__module__", module)
    source, tree = _parsed(home)
    node: ast.AST = tree
    for name in (first, *filter(None, rest.split("."))):
        node = _child(node, name, f"{home}.{attribute}")
    return _hash_tokens(_source_of(source, node))


def forget_sources() -> None:
    """Release what parsed sources take, about 12 MiB for all seams, once they are compared."""
    _parsed.cache_clear()


@functools.lru_cache(maxsize=32)
def _parsed(module: str) -> tuple[str, ast.Module]:
    source = inspect.getsource(importlib.import_module(module))
    return source, ast.parse(source)


def _child(node: ast.AST, name: str, wanted: str) -> ast.AST:
    for child in getattr(node, "body", ()):
        if isinstance(child, ast.ClassDef | ast.FunctionDef) and child.name == name:
            return child
    raise AttributeError(f"{wanted}: no definition of {name}")


def _source_of(source: str, node: ast.AST) -> str:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(d.lineno for d in decorators)])  # type: ignore[attr-defined]
    lines = source.splitlines()[first - 1 : node.end_lineno]  # type: ignore[attr-defined]
    return textwrap.dedent("\n".join(lines) + "\n")


def _hash_tokens(source: str) -> str:
    digest = hashlib.sha256()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            digest.update(token.string.encode())
            digest.update(b"\0")
    return digest.hexdigest()[:16]
