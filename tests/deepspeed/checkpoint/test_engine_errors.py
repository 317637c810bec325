"""Errors of the system in a save, as the engine's functions explain them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

from memascend.checkpoint.folder import SavingFolder
from memascend.deepspeed.checkpoint.engine import explained
from memascend.errors import CheckpointError


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (errno.EROFS, "the file system is read-only"),
        (errno.ENOSPC, "its file system is full"),
        (errno.EIO, "the drive failed or was pulled out"),
        (errno.EACCES, "this user may not write there"),
        (errno.ENOENT, "another program removed it meanwhile"),
    ],
)
def test_what_the_system_refuses_a_save_is_explained(tmp_path: Path, code: int, cause: str) -> None:
    folder = SavingFolder(str(tmp_path), "a")
    text = rf"cannot save to {folder.target}: .*\nlikely cause: {cause}.*\nfix: "
    with pytest.raises(CheckpointError, match=text), explained(folder):
        raise OSError(code, os.strerror(code))
    with pytest.raises(CheckpointError, match=r"^ours$"), explained(folder):
        raise CheckpointError("ours")
