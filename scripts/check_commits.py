#!/usr/bin/env python3
"""Checks the messages of the commits since the rule: a subject of at most 72 characters, and why.

Nothing is checked where there is no history, as in an archive or in a shallow clone.
"""

from __future__ import annotations

import subprocess
import sys

#: The last commit that the rule does not bind.
BEFORE = "0ac12199041072a04ccbd3b36b3f7d54b474f687"
SUBJECT_LENGTH_MAX = 72


def mistake(message: str) -> str:
    """Return what is wrong with a commit's message; empty where nothing is."""
    subject, _, body = message.strip().partition("\n")
    if len(subject) > SUBJECT_LENGTH_MAX:
        return f"a subject of {len(subject)} characters, above {SUBJECT_LENGTH_MAX}: {subject}"
    return "" if body.strip() else f"no body that says why: {subject}"


def main() -> int:
    """Print what is wrong, a line for each commit."""
    command = ["git", "log", "--no-merges", "-z", "--format=%h%x09%B", f"{BEFORE}..HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    wrong = 0
    for entry in filter(None, found.split("\0")):
        commit, _, message = entry.partition("\t")
        if told := mistake(message):
            print(f"{commit}: {told}")
            wrong += 1
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
