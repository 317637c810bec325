"""Setting up the development environment, as far as it goes without a network."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_path_with_a_space_is_refused_before_anything_is_installed(tmp_path: Path) -> None:
    checkout = tmp_path / "a checkout"
    (checkout / "scripts").mkdir(parents=True)
    script = shutil.copy(ROOT / "scripts" / "setup_environment.sh", checkout / "scripts")
    done = subprocess.run([script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert str(checkout) in done.stderr
    assert "fix: move this checkout" in done.stderr
    assert not (checkout / ".venv").exists()
