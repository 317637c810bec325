"""The compiler that torch finds when make has operators compiled."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "quick_compiler"


def test_the_next_compiler_is_asked_for_no_debug_information(tmp_path: Path) -> None:
    """Found by whatever name of its folder, and not itself again."""
    fake = tmp_path / "c++"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    places = [f"{FOLDER}/", str(FOLDER), str(tmp_path), os.defpath]
    done = subprocess.run(
        ["c++", "-g", "a name.cpp"],
        env={"PATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines() == ["-g", "a name.cpp", "-g0"]
