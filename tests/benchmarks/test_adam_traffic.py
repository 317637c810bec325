"""Memory traffic of the Adam step, as cachegrind sees it."""

from __future__ import annotations

import shutil

import adam_traffic
import pytest

REPORT = """
==7== LL refs:        1,045,678  (  900,000 rd   +   145,678 wr)
==7== LL misses:        524,288  (  400,000 rd   +   124,288 wr)
==7== LL miss rate:         0.1% (      0.1%     +       0.5%  )
"""


def test_the_missed_lines_are_read_from_what_cachegrind_prints() -> None:
    assert adam_traffic.missed_lines(REPORT) == 524_288
    with pytest.raises(SystemExit, match="no misses"):
        adam_traffic.missed_lines("==7== killed")


def test_what_one_step_more_misses_is_one_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {1: 1000, 2: 1250}
    monkeypatch.setattr(
        adam_traffic, "count_missed_lines", lambda numel, dtype, steps: lines[steps]
    )
    assert adam_traffic.read_bytes(1000, "bfloat16") == 250 * 64 / 1000


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="needs valgrind: apt-get install it")
def test_one_pass_reads_each_byte_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradient, weight and moments, and the output's lines before they are overwritten."""
    monkeypatch.setattr(adam_traffic, "LAST_LEVEL", (1 << 18, 16, 64))
    assert adam_traffic.read_bytes(1 << 20, "bfloat16") == pytest.approx(2 + 12 + 2, rel=0.02)
