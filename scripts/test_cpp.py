#!/usr/bin/env python3
"""Builds and runs the C++ tests: plain programs that exit 0 (pass), 1 (fail) or 77 (skipped).

The first lines of each tests/cpp/**/*_test.cpp name the sources it links: `// sources: csrc/a.cpp`,
patterns such as csrc/nvme/**/*.cpp included, which leave out tests.
Objects are shared between tests and built again only when something they include has changed.
With --arch another machine's are built by the distribution's cross compiler and run by qemu's user
mode (on Debian: g++-aarch64-linux-gnu, qemu-user-static).
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = "// sources:"
MACHINE = platform.machine()
SKIPPED = 77
TIMEOUT_S = 600

FLAGS = [
    "-std=c++20",
    "-Icsrc",
    "-Itests/cpp",
    "-pthread",
    "-ffp-contract=off",  # as in setup.py
    "-Wall",
    "-Wextra",
    "-Wshadow",
    "-Wconversion",
]
# A sanitizer's reports need lines and no variables: a quarter of the compiler's time less.
SANITIZERS = {
    "plain": ["-O2", "-g"],
    "address": [
        "-O1",
        "-g1",
        "-fno-omit-frame-pointer",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
    ],
    "thread": ["-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=thread"],
}


def main() -> int:
    """Builds everything, runs everything, prints one summary line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--san", choices=list(SANITIZERS), default="plain")
    parser.add_argument("--arch", choices=sorted({MACHINE, "aarch64", "x86_64"}), default=MACHINE)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("filter", nargs="*", help="only tests whose path contains one of these")
    args = parser.parse_args()
    os.chdir(ROOT)
    if args.arch != MACHINE:
        # For tests that build a library, and those that need a kernel's newer calls.
        os.environ |= {"CXX": compiler_for(args.arch), "MEMASCEND_TEST_EMULATED": "1"}
    tests = sorted(
        path
        for path in Path("tests/cpp").rglob("*_test.cpp")
        if not args.filter or any(word in str(path) for word in args.filter)
    )
    if not tests:
        print("no such C++ tests")
        return 1
    try:
        programs = build_tests(tests, args.san, args.jobs, args.arch)
    except subprocess.CalledProcessError as error:
        print(f"cannot build: {' '.join(error.cmd)}")
        return 1

    def run(test: Path) -> str:
        return run_test(test, command_of(programs[test], args.san, args.arch))

    with ThreadPoolExecutor(args.jobs) as pool:
        outcomes = dict(zip(programs, pool.map(run, programs), strict=True))
    counts = {state: list(outcomes.values()).count(state) for state in ("ok", "fail", "skip")}
    for test, state in outcomes.items():
        if state == "fail":
            print(f"failed: {test}")
    how = f"{args.san}, {args.arch}"
    print(f"{counts['ok']} passed, {counts['fail']} failed, {counts['skip']} skipped ({how})")
    return 1 if counts["fail"] else 0


def build_tests(
    tests: Sequence[Path], sanitizer: str, jobs: int, arch: str = MACHINE
) -> dict[Path, Path]:
    """Compiles every source once and links one program per test."""
    build = Path("build/cpp", sanitizer if arch == MACHINE else f"{sanitizer}-{arch}")
    compiler = compiler_for(arch)
    flags = [*FLAGS, *SANITIZERS[sanitizer]]
    build.mkdir(parents=True, exist_ok=True)
    _discard_when_changed(build, [compiler, *flags])
    parts = {test: [test, *named_sources(test)] for test in tests}
    objects = {source: build / f"{source}.o" for sources in parts.values() for source in sources}
    stale = [source for source, target in objects.items() if is_stale(target)]
    if stale:
        print(f"compiling {len(stale)} of {len(objects)} files, {jobs} at once", flush=True)

    def compile_one(source: Path) -> None:
        target = objects[source]
        target.parent.mkdir(parents=True, exist_ok=True)
        _call([compiler, *flags, "-MMD", "-c", str(source), "-o", str(target)])

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(compile_one, stale))

    def link(test: Path) -> Path:
        program = build / test.with_suffix("")
        inputs = [objects[source] for source in parts[test]]
        newest = max(path.stat().st_mtime for path in inputs)
        if not program.exists() or program.stat().st_mtime < newest:
            _call([compiler, *flags, *map(str, inputs), "-o", str(program)])
        return program

    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(tests, pool.map(link, tests), strict=True))


def compiler_for(arch: str) -> str:
    """The compiler that makes programs for a machine."""
    return os.environ.get("CXX", "g++") if arch == MACHINE else f"{arch}-linux-gnu-g++"


def run_test(test: Path, command: Sequence[str]) -> str:
    """Runs one program, shows what it printed unless it passed, and gives ok, fail or skip."""
    started_s = time.monotonic()
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S
        )
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        status, output = 1, (error.stdout or b"") + f"timeout after {TIMEOUT_S} s\n".encode()
    state = {0: "ok", SKIPPED: "skip"}.get(status, "fail")
    text = f"{state:4} {test} ({time.monotonic() - started_s:.1f} s)\n"
    if state != "ok":
        text += output.decode(errors="replace")
        if status not in (1, SKIPPED):
            text += f"exit status {status}\n"
    print(text, end="", flush=True)  # at once: others are run beside it
    return state


def command_of(program: Path, sanitizer: str, arch: str = MACHINE) -> list[str]:
    """How a program is started."""
    if arch != MACHINE:
        # Debian's folder of what cross compiled programs link; a static qemu needs no other set-up.
        emulator = shutil.which(f"qemu-{arch}-static") or f"qemu-{arch}"
        return [emulator, "-L", f"/usr/{arch}-linux-gnu", str(program)]
    if sanitizer == "thread" and shutil.which("setarch"):
        # The thread sanitizer's shadow memory collides with addresses randomized in 32 bits.
        return ["setarch", MACHINE, "-R", str(program)]
    return [str(program)]


def named_sources(test: Path) -> list[Path]:
    """Reads the sources a test links from its first lines."""
    lines = test.read_text(encoding="utf-8").splitlines()
    named = [*itertools.takewhile(lambda line: line.startswith(HEADER), lines)]
    if not named:
        raise SystemExit(f"{test}: the first line has to be '{HEADER} csrc/...', got {lines[:1]}")
    sources: dict[Path, None] = {}
    for pattern in " ".join(line.removeprefix(HEADER) for line in named).split():
        found = [path for path in sorted(Path().glob(pattern)) if not path.match("*_test.cpp")]
        if not found:
            raise SystemExit(f"{test}: no such source: {pattern}")
        sources.update(dict.fromkeys(found))
    return list(sources)


def is_stale(target: Path) -> bool:
    """Whether an object is missing or older than something it was made from."""
    makefile = target.with_suffix(".d")
    if not target.exists() or not makefile.exists():
        return True
    names = makefile.read_text(encoding="utf-8").partition(":")[2].replace("\\\n", " ").split()
    built = target.stat().st_mtime
    return any(not Path(name).exists() or Path(name).stat().st_mtime > built for name in names)


def _discard_when_changed(build: Path, command: Sequence[str]) -> None:
    """Empties the build folder when the compiler or its flags are not those it was made with."""
    stamp = build / "command"
    wanted = " ".join(command)
    if stamp.exists() and stamp.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(build)
        build.mkdir()
    stamp.write_text(wanted, encoding="utf-8")


def _call(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout, end="")
    done.check_returncode()


if __name__ == "__main__":
    sys.exit(main())
