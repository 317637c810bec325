"""Virtual environments in which `make test-versions` and `make test-frameworks` try the checkout.

PIP_ARGS are given to every pip. DeepSpeed's operators are compiled in each environment anew; where
releases take turns, an operator is compiled again when its sources or flags change.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 1800
LOG_TAIL_LINES = 30
#: Of DeepSpeed's operators, in an environment.
SOURCES = "lib/python*/site-packages/deepspeed/ops/csrc"
#: Builders of those that training needs on a CPU, and of the one for stock DeepSpeed's drives.
TRAINING = ("CPUAdamBuilder", "ShareMemCommBuilder", "PinMemoryBuilder")
DRIVES = "AsyncIOBuilder"
#: Compiles the operators of the builders that are named, so that no test waits for a compiler. An
#: older release may lack one.
COMPILE = """
import sys
from deepspeed.accelerator import get_accelerator
for name in sys.argv[1:]:
    builder = get_accelerator().create_op_builder(name)
    if type(builder).__name__ == name:
        builder.load(verbose=False)
"""


@functools.cache
def build_wheel(folder: Path, python: str = sys.executable) -> Path:
    """Build this checkout's wheel in the folder, for one Python, and return its path.

    Its core is put into the checkout as well, which tests import.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        command = [python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", made]
        subprocess.run([*command, str(ROOT)], check=True, timeout=TIMEOUT_S)
        [wheel] = Path(made).iterdir()
        with zipfile.ZipFile(wheel) as archive:
            for name in fnmatch.filter(archive.namelist(), "memascend/_core.*.so"):
                if not (ROOT / name).exists():
                    archive.extract(name, ROOT)
        return wheel.replace(folder / wheel.name)


def digest_of(path: Path) -> str:
    """Return a digest of the file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Environment:
    """A virtual environment, and a log beside it of everything that was run in it."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.folder = folder
        self._python = python
        self.log = folder.with_suffix(folder.suffix + ".log")

    @property
    def is_ready(self) -> bool:
        """Whether `finish` was called, now or by an earlier program."""
        return (self.folder / "ready").exists()

    def create(self) -> None:
        """Make an empty environment, in place of a half-made one."""
        self.remove()
        self.log.unlink(missing_ok=True)
        self._call(self._python, "-m", "venv", str(self.folder))

    def finish(self) -> None:
        """Note that everything that belongs into the environment is installed."""
        (self.folder / "ready").touch()

    def remove(self) -> None:
        """Remove the environment, but not its log."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def install(self, *words: str) -> None:
        """Run `pip install`.

        Raises:
            CalledProcessError: pip failed; the log says why.
        """
        extra = os.environ.get("PIP_ARGS", "").split()
        pip = (str(self.folder / "bin" / "python"), "-m", "pip", "install", "--quiet")
        self._call(*pip, "--disable-pip-version-check", *extra, *words)

    def exchange_deepspeed(self, release: str) -> None:
        """Install another release of DeepSpeed, and compile the operators that differ.

        Raises:
            CalledProcessError: pip failed; the log says why.
        """
        with self._times_kept():
            self.install("--no-build-isolation", "--no-deps", f"deepspeed=={release}")
        self.python("-c", COMPILE, *TRAINING, DRIVES)

    @contextmanager
    def _times_kept(self) -> Iterator[None]:
        """Let sources that stay the same keep their times, which ninja compares; others are new."""
        before = {(path, digest_of(path)): path.stat() for path in self._sources()}
        yield
        for path in self._sources():
            known = before.get((path, digest_of(path)))
            if known is None:
                os.utime(path)  # pip may keep the time of a file in an archive
            else:
                os.utime(path, ns=(known.st_atime_ns, known.st_mtime_ns))

    def _sources(self) -> list[Path]:
        found = (path for root in self.folder.glob(SOURCES) for path in root.rglob("*"))
        return [path for path in found if path.is_file()]

    def python(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run the environment's Python in the checkout, and return what it printed."""
        return self.run([str(self.folder / "bin" / "python"), *words], folder=ROOT)

    def run(
        self, command: list[str], *, folder: Path, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a folder, with the environment's programs first on the path.

        Its standard output is returned and logged, its standard error is logged.
        """
        with self.log.open("a", encoding="utf-8") as log:
            done = subprocess.run(
                command,
                cwd=folder,
                env=self._variables() | dict(variables or {}),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                timeout=TIMEOUT_S,
            )
            log.write(done.stdout)
        return done

    def tail(self) -> str:
        """Return the end of the log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def _call(self, *command: str) -> None:
        with self.log.open("a", encoding="utf-8") as log:
            subprocess.run(
                command,
                check=True,
                env=self._variables(),
                stdout=log,
                stderr=log,
                timeout=TIMEOUT_S,
            )

    def _variables(self) -> dict[str, str]:
        """Return the caller's, with the environment's programs first and operators of its own."""
        own = {
            "PATH": os.pathsep.join([str(self.folder / "bin"), os.environ["PATH"]]),
            "TORCH_EXTENSIONS_DIR": str(self.folder / "operators"),
            "DS_BUILD_OPS": "0",
        }
        return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | own
