#!/usr/bin/env python3
"""Writes memascend/deepspeed/seams/fingerprints.py, or tells how a new DeepSpeed differs.

Without arguments it reads every known release anew, which is needed once the list of definitions in
seams/table.py has changed. With a release, such as 0.19.9, or whatever else pip installs, such as
git+https://github.com/deepspeedai/DeepSpeed, it prints what differs from the known release that it
is most like: each definition with its changes, our files that name it, and the tests of both. Then
the status is 1. `--add` adds a release to the table: only do so after its tests pass, since the
table says "these seams fit this code". Releases are installed below --folder, each alone.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from memascend.deepspeed.seams import fingerprints
from memascend.deepspeed.seams.compare import MISSING, definitions, digest_of_files, nearest
from memascend.deepspeed.seams.fingerprint import source_of
from memascend.deepspeed.seams.table import SEAMS, relied_on

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv" / "deepspeed"
TARGET = ROOT / "memascend" / "deepspeed" / "seams" / "fingerprints.py"
HEAD = '''"""Fingerprints of the upstream definitions that the seams were written for.

Written by scripts/update_fingerprints.py; do not edit.
"""

from __future__ import annotations
'''
#: Where our files and tests stand that may name a definition.
OURS, TESTS = ROOT / "memascend" / "deepspeed", ROOT / "tests"
#: How many of our files may have a word for it to mean the one definition.
COMMON = 8


@dataclass(frozen=True)
class Release:
    """What was read of an installed release.

    Attributes:
        version: As it calls itself.
        digest: Of all files with a definition.
        definitions: Fingerprints by name, or MISSING.
        sources: Texts of definitions by name; "" for one that is missing.
    """

    version: str
    digest: str
    definitions: dict[str, str]
    sources: dict[str, str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Updates the table, or prints a report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where releases are installed")
    parser.add_argument("--add", action="store_true", help="add the release to the table")
    parser.add_argument("--read", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("release", nargs="?", help="a release, or what pip installs it from")
    args = parser.parse_args(arguments)
    if args.read:
        print(json.dumps(read_installed().__dict__))
        return 0
    if args.release and not args.add:
        return report(read(args.release, args.folder), args.folder)
    known = [*fingerprints.VERSIONS]
    wanted = {*known, args.release} if args.add else {*known}
    releases = [read(one, args.folder) for one in sorted(wanted, key=numbers)]
    TARGET.write_text(table(releases), encoding="utf-8")
    return 0


# -- reading releases ------------------------------------------------------------------------------


def read(release: str, folder: Path) -> Release:
    """Returns what a release has, in a process of its own; installs it first, alone.

    A folder whose name begins with a digit has a release, which stays as it is. Another requirement
    may mean other code than yesterday, and is installed again.
    """
    place = folder / re.sub(r"[^\w.]+", "-", release)
    is_fixed = release[0].isdigit()
    if not (is_fixed and (place / "deepspeed").is_dir()):
        shutil.rmtree(place, ignore_errors=True)
        requirement = f"deepspeed=={release}" if is_fixed else release
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps")
        words = ("--no-build-isolation", "--target", str(place), requirement)
        subprocess.run([*pip, *words], check=True, env={**os.environ, "DS_BUILD_OPS": "0"})
    paths = os.pathsep.join([str(place.resolve()), str(ROOT)])
    done = subprocess.run(
        [sys.executable, __file__, "--read"],
        check=True,
        env={**os.environ, "PYTHONPATH": paths, "MEMASCEND_DISABLE": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    print(f"read DeepSpeed {release}", file=sys.stderr)
    return Release(**json.loads(done.stdout.splitlines()[-1]))


def read_installed() -> Release:
    """Returns what this process's DeepSpeed has."""
    import deepspeed

    found, sources = definitions(), {}
    for module, attribute in relied_on():
        name = f"{module}.{attribute}"
        sources[name] = "" if found[name] == MISSING else source_of(module, attribute)
    return Release(deepspeed.__version__, digest_of_files(), found, sources)


def numbers(release: str) -> list[int]:
    """Returns the numbers of a release, to sort by."""
    return [int(number) for number in re.findall(r"\d+", release)]


# -- the table -------------------------------------------------------------------------------------


def table(releases: Sequence[Release]) -> str:
    """Returns the text of fingerprints.py for releases in their order."""
    lines = [HEAD, "#: The digest of all files with such a definition, by release; oldest first."]
    lines.append("DIGESTS: dict[str, str] = {")
    lines += [f"    {one.version!r}: {one.digest!r}," for one in releases]
    lines += ["}", "VERSIONS: tuple[str, ...] = tuple(DIGESTS)", ""]
    lines.append(
        "#: The fingerprints of each definition, each after the first release that has it."
    )
    lines.append("KNOWN: dict[str, str] = {")
    for name in sorted(releases[-1].definitions):
        found = " ".join(f"{since} {now}" for since, now in changes(name, releases).items())
        lines.append(f"    {name!r}: {found!r},")
    lines.append("}")
    return "\n".join(lines).replace("'", '"') + "\n"


def changes(name: str, releases: Iterable[Release]) -> dict[str, str]:
    """Returns the fingerprints of a definition, each with the first release that has it."""
    found: dict[str, str] = {}
    last = ""
    for release in releases:
        now = release.definitions[name]
        if now != last:
            found[release.version] = last = now
    return found


# -- the report ------------------------------------------------------------------------------------


def report(new: Release, folder: Path) -> int:
    """Prints how a release differs from the known one that it is most like."""
    compared = nearest(new.definitions)
    old, names = read(compared.release, folder), [*compared.differing]
    print(f"DeepSpeed {new.version} against {old.version}: {len(names)} definitions differ")
    for name in names:
        print("\n".join(["", f"== {name}", *difference(old.sources[name], new.sources[name])]))
        files, tests = who_speaks_of(name)
        print(f"-- ours: {', '.join(files) or 'none names it'}")
        print(f"-- tests: {', '.join(tests) or 'none names it'}")
    if names:
        print("\nThen: CONTRIBUTING.md, Another release of DeepSpeed")
    return 1 if names else 0


def difference(old: str, new: str) -> list[str]:
    """Returns the changes of a text, without head."""
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=2)
    return [*lines][2:]


def who_speaks_of(name: str) -> tuple[list[str], list[str]]:
    """Returns our files that name a definition, and the tests of those or that name it too.

    A file of DeepSpeed goes by its name, a class's `__init__` by the class. A plain word that many
    files have, such as `step`, counts beside the name of its class alone, or where it is replaced.
    """
    owner, _, last = name.rpartition(".")
    owner = owner.rpartition(".")[2]
    words = [Path(name).stem if "/" in name else owner if last == "__init__" else last]
    files = files_with(words, OURS)
    if last.isalpha() and len(files) > COMMON:
        words.append(owner)
        files = [*replacements(name), *files_with(words, OURS)]
    tests = files_with(words, TESTS)
    for file in files:
        place = TESTS / file.relative_to(ROOT / "memascend").parent
        tests += sorted(place.glob(f"test_{file.stem}*.py"))
    return as_text(files), as_text(tests)


def files_with(words: Iterable[str], root: Path) -> list[Path]:
    """Returns the files below a folder that have each of the words; not those of all seams."""
    found = []
    for path in sorted(root.rglob("*.py")):
        is_table = root == OURS and path.parent.name == "seams" and path.stem != "transformers"
        text = "" if is_table else path.read_text("utf-8")
        if all(re.search(rf"\b{re.escape(word)}\b", text) for word in words):
            found.append(path)
    return found


def replacements(name: str) -> list[Path]:
    """Returns our file that replaces a definition; none where it is only watched."""
    modules = [
        seam.replacement.partition(":")[0]
        for seam in SEAMS
        if name in (f"{seam.module}.{seam.attribute}", f"{seam.module}.{seam.older}")
    ]
    return [ROOT / f"{module.replace('.', '/')}.py" for module in modules]


def as_text(paths: Iterable[Path]) -> list[str]:
    """Returns paths from the root on, each once."""
    return [*dict.fromkeys(path.relative_to(ROOT).as_posix() for path in paths)]


if __name__ == "__main__":
    sys.exit(main())
