"""GPUs as the driver tells them: its program is replaced by a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from memascend.base.units import GIB, MIB
from memascend.system.gpus import Gpu, list_gpus


def with_driver(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_each_gpu_has_a_name_memory_and_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = "NVIDIA GeForce RTX 4090, 24564, 560.35.03\nNVIDIA H100, 81920, 560.35.03"
    with_driver(tmp_path, monkeypatch, f"echo '{rows}'")
    assert list_gpus() == [
        Gpu("NVIDIA GeForce RTX 4090", 24564 * MIB, "560.35.03"),
        Gpu("NVIDIA H100", 80 * GIB, "560.35.03"),
    ]


@pytest.mark.parametrize("text", ["exit 9", "echo 'No devices were found'", "echo 'A, [N/A], 1'"])
def test_a_driver_that_knows_no_gpu_gives_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    with_driver(tmp_path, monkeypatch, text)
    assert list_gpus() == []


def test_without_a_driver_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list_gpus() == []
