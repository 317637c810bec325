"""An engine for each trial of a search: behind `engine.destroy()` nothing of ours stays."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from memascend.base.units import MIB

from .programs import REPOSITORY, alone, importing_tests, run

pytestmark = pytest.mark.deepspeed

PROGRAM = REPOSITORY / "tests" / "integration" / "trials_program.py"


#: Of 15 trials. CPU offload grows by 0.5 MiB in each, memascend by less than 0.1 MiB; an engine has
#: 10 MiB.
GROWTH_BYTES_MAX = 20 * MIB


def test_destroyed_engines_leave_no_memory_drive_space_descriptors_or_threads(
    tmp_path: Path,
) -> None:
    """Each left 256 MiB of drive, three descriptors and a thread: DeepSpeed keeps every module."""
    (tmp_path / "drive").mkdir()
    done = run(
        [str(PROGRAM), str(tmp_path / "drive")],
        cwd=tmp_path,
        environment=importing_tests() | alone(),
    )
    (line,) = re.findall(r"^RESULT (.*)$", done.stdout, re.MULTILINE) or [""]
    assert line, done.stdout[-4000:]
    found = json.loads(line)
    assert all((one["blocks"], one["ours"]) == (0, 0) for one in found), found
    # The first trials load what stays for the process: torch's threads, autograd's.
    for name in ("descriptors", "threads"):
        assert found[-1][name] <= found[4][name], (name, found)
    grown_bytes = found[-1]["anonymous_bytes"] - found[4]["anonymous_bytes"]
    assert grown_bytes <= GROWTH_BYTES_MAX, [one["anonymous_bytes"] for one in found]
