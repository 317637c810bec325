"""What the documents of the repository contain: their pages, blocks of code, and commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.support.scripts import load_script
from tests.support.source_tree import ROOT

DOCUMENTS = [*load_script("docs_site").documents(), *sorted(ROOT.glob(".github/**/*.md"))]
each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix()
)
#: From fence to fence, with the language that the first one names.
_BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
#: Code within the text; a line may end in it, a paragraph may not.
_SPAN = re.compile(r"`((?:[^`\n]|\n(?!\s*\n))+)`")
_VARIABLE = re.compile(r"[A-Z_]+=.*")


def read(path: Path) -> str:
    """Return the text of a document."""
    return path.read_text(encoding="utf-8")


def code_blocks(path: Path, *languages: str) -> list[str]:
    """Return the blocks of code in these languages; "" is a block that names none."""
    return [text for language, text in _BLOCK.findall(read(path)) if language in languages]


def code_spans(path: Path) -> set[str]:
    """Return the code within the text, each piece in one line."""
    return {" ".join(span.split()) for span in _SPAN.findall(_BLOCK.sub("", read(path)))}


def code_lines(path: Path) -> list[str]:
    """Return the lines of the blocks of code that are commands, continued lines joined."""
    blocks = code_blocks(path, "", "sh", "bash")
    return "".join(blocks).replace("\\\n", " ").splitlines()


def command_lines(path: Path) -> list[list[str]]:
    """Return the words of every command, in blocks of code and in code within the text.

    Variables before a command are left out, and so is what is only hinted at by "...".
    """
    found = []
    for text in (*code_lines(path), *sorted(code_spans(path))):
        try:
            words = shlex.split(text, comments=True)
        except ValueError:
            continue
        while words and _VARIABLE.fullmatch(words[0]):
            del words[0]
        if words and "..." not in words:
            found.append(words)
    return found


def commands(path: Path, program: str) -> list[list[str]]:
    """Return what stands behind a program, of every use of it."""
    return [words[1:] for words in command_lines(path) if words[0] == program and words[1:]]
