"""Starts programs only as far as their parsers: `python -m tests.support.parsers < PROGRAMS.json`.

PROGRAMS.json is a list of Python files with arguments, as a shell has them. Prints, as JSON, the
message of each parser that did not take its arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import runpy
import shlex
import sys
from typing import Any

from tests.support.source_tree import ROOT

_parse = argparse.ArgumentParser.parse_known_args
_depth = 0


class Taken(BaseException):
    """A parser took all arguments; not an Exception, so that no program catches it."""


def parse_and_end(parser: argparse.ArgumentParser, *arguments: Any, **named: Any) -> Any:
    """Parse, and end the program if nothing is left; parsers of sub-commands are within."""
    global _depth
    _depth += 1
    try:
        result, left = _parse(parser, *arguments, **named)
    finally:
        _depth -= 1
    if _depth == 0 and not left:
        raise Taken
    return result, left


def refusal(program: str) -> str:
    """Return a program's message about its arguments; empty: it took them."""
    words = shlex.split(program)
    path = str(ROOT / words[0])
    with open(path, encoding="utf-8") as file:
        if len(words) == 1 and "ArgumentParser" not in file.read():
            return ""  # it would do its work
    sys.argv = [path, *words[1:]]
    sys.path.insert(0, os.path.dirname(path))
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            runpy.run_path(path, run_name="__main__")
    except Taken:
        return ""
    except SystemExit as ended:
        return f"exit status {ended.code}: {said.getvalue()}" if ended.code else ""
    except Exception as error:
        return repr(error)
    finally:
        sys.path.remove(os.path.dirname(path))
    return "it has no parser"


if __name__ == "__main__":
    argparse.ArgumentParser.parse_known_args = parse_and_end  # type: ignore
    refusals = {program: refusal(program) for program in json.load(sys.stdin)}
    print(json.dumps({program: said for program, said in refusals.items() if said}))
