"""Virtual environments in which `make test-versions` and `make test-frameworks` try the checkout.

PIP_ARGS are given to every pip. DeepSpeed's operators are compiled when a run first needs them, in
each environment anew.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 1800
LOG_TAIL_LINES = 30


def build_wheel(folder: Path) -> Path:
    """Build this checkout's wheel in the folder, once for all environments, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        words = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", made)
        command = [sys.executable, "-m", "pip", *words, str(ROOT)]
        subprocess.run(command, check=True, timeout=TIMEOUT_S)
        [wheel] = Path(made).iterdir()
        return wheel.replace(folder / wheel.name)


class Environment:
    """A virtual environment, and a log beside it of everything that was run in it.

    Attributes:
        deepspeed: The installed release of DeepSpeed, where they take turns. Each has operators of
            its own: their sources differ, and times of files do not tell.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.deepspeed = ""
        self.log = folder.with_suffix(folder.suffix + ".log")

    @property
    def is_ready(self) -> bool:
        """Whether `finish` was called, now or by an earlier program."""
        return (self.folder / "ready").exists()

    def create(self) -> None:
        """Make an empty environment, in place of a half-made one."""
        self.remove()
        self.log.unlink(missing_ok=True)
        self._call(sys.executable, "-m", "venv", str(self.folder))

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
            "TORCH_EXTENSIONS_DIR": str(self.folder / "operators" / self.deepspeed),
            "DS_BUILD_OPS": "0",
        }
        return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | own
