"""The kernel's counts of this process, and the best that is left where a sandbox lacks some."""

from __future__ import annotations

from pathlib import Path

import harness
import kernel_counts
import pytest


def test_a_kernel_with_all_of_its_files_lacks_nothing() -> None:
    assert kernel_counts.lacks() == {}
    assert "lacks" not in harness.machine()
    assert kernel_counts.host_peak_bytes() > 0


def test_without_the_switch_peaks_are_counted_from_the_start_and_the_record_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kernel_counts.host_peak_bytes()
    switch = tmp_path / "absent" / "clear_refs"
    monkeypatch.setattr(kernel_counts, "CLEAR_REFS", switch)
    assert kernel_counts.host_peak_bytes() >= before
    assert harness.peak_rss_growth(lambda: None) >= 0
    [(name, reason)] = harness.machine()["lacks"].items()
    assert name == "peaks of host memory"
    assert "since the process began" in reason
    assert str(switch) in reason


def test_without_a_high_water_mark_the_present_memory_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_counts, "process_status", lambda pid: {"VmRSS": 4096})
    assert kernel_counts.host_peak_bytes() == 4096
    assert "VmHWM" in kernel_counts.lacks()["peaks of host memory"]


def test_traffic_that_is_not_counted_is_zero_and_the_record_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = tmp_path / "io"
    monkeypatch.setattr(kernel_counts, "IO", counts)
    assert kernel_counts.storage_bytes() == (0, 0)
    assert str(counts) in kernel_counts.lacks()["traffic of the drive"]
    counts.write_text("rchar: 9\nread_bytes: 4096\nwrite_bytes: 512\n")
    assert kernel_counts.storage_bytes() == (4096, 512)
    assert kernel_counts.lacks() == {}
