"""Recognising upstream definitions: a hash of their tokens, comments and layout dropped.

A seam is only safe over the definition it was written for. Comparing tokens instead of versions accepts
every release in which that definition did not change, and refuses a changed one inside a known release.
"""

from __future__ import annotations

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
    """Imports `module` and follows the dotted `attribute` in it.

    Raises:
        ImportError: There is no such module.
        AttributeError: There is no such definition.
    """
    target: object = importlib.import_module(module)
    for name in attribute.split("."):
        target = getattr(target, name)
    return target


def fingerprint(definition: object) -> str:
    """Gives 16 hex digits that change when the code of a function or class changes.

    Raises:
        OSError: The source is not at hand.
    """
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(definition)))  # type: ignore[arg-type]
    digest = hashlib.sha256()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            digest.update(token.string.encode())
            digest.update(b"\0")
    return digest.hexdigest()[:16]
