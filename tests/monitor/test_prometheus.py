"""What Prometheus is given has its form: each name with help and type, once, and labels."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from memascend.monitor.prometheus import as_prometheus
from memascend.monitor.runs import RankFile
from memascend.monitor.status import FINISHED, Status
from tests.support.statuses import MIB, ledger, status

SAMPLE = re.compile(r'([a-z_]+)\{((?:[a-z]+="(?:[^"\\\n]|\\.)*",?)+)\} (\S+)')


def told(*statuses: Status) -> str:
    return as_prometheus([RankFile(Path("x"), one, True) for one in statuses])


def samples(text: str) -> dict[tuple[str, str], float]:
    """Every sample by name and labels."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = SAMPLE.fullmatch(line)
            assert match, line
            name, labels, value = match.groups()
            assert (name, labels) not in found, "a sample twice"
            found[name, labels] = float(value)
    return found


def test_every_name_has_help_and_type_once_and_its_samples_behind_them() -> None:
    names = []
    for line in told(status(), status(rank=1)).splitlines():
        words = line.split(" ")
        if words[:2] == ["#", "HELP"]:
            assert words[2] not in names
            names.append(words[2])
            assert line.endswith(".")
        elif words[:2] == ["#", "TYPE"]:
            assert words[2] == names[-1]
            assert words[3] == ("counter" if names[-1].endswith("_total") else "gauge")
        else:
            assert line.startswith(f"{names[-1]}{{")
    assert len(names) > 15


def test_samples_have_base_units_and_are_counted_by_rank_and_component() -> None:
    found = samples(told(status(), status(rank=1)))
    for labels, name, value in (
        ('rank="0",component="staging slots"', "memascend_host_memory_bytes", 6 * MIB),
        ('rank="1",component="staging slots"', "memascend_host_memory_peak_bytes", 8 * MIB),
        ('rank="0"', "memascend_host_memory_limit_bytes", 64 * MIB),
        ('rank="1",volume="/mnt/ssd"', "memascend_volume_read_bytes_total", 6000 * MIB),
        ('rank="0",phase="backward"', "memascend_step_seconds", 1.0),
        ('rank="0"', "memascend_tokens_per_second", 1024.0),
        ('rank="0"', "memascend_time_left_seconds", 470 * 2.0),
        ('rank="0"', "memascend_running", 1.0),
    ):
        assert found[name, labels] == value
    quantile = 'rank="0",volume="/mnt/ssd",operation="write",quantile="0.99"'
    assert found["memascend_volume_latency_seconds", quantile] == 0.002


def test_what_is_unknown_has_no_sample() -> None:
    unknown = status(
        mean=None,
        steps_total=None,
        tokens_per_second=None,
        ledger=ledger(limit_bytes=None, wear=None, volumes=(), drive={}),
    )
    names = {name for name, _ in samples(told(unknown))}
    assert "memascend_steps_total" in names
    for name in ("step_seconds", "steps_planned", "host_memory_limit_bytes", "volume_busy_seconds"):
        assert not any(name in found for found in names)


def test_a_rank_that_has_ended_does_not_run() -> None:
    ended = RankFile(Path("a"), status(phase=FINISHED), True)
    died = RankFile(Path("b"), status(rank=1), False)
    unreadable = RankFile(Path("c"), None, None, "half a file")
    found = samples(as_prometheus([ended, died, unreadable]))
    running = {labels: value for (name, labels), value in found.items() if name.endswith("running")}
    assert running == {'rank="0"': 0, 'rank="1"': 0}


def test_labels_are_escaped() -> None:
    (volume,) = ledger().volumes
    odd = replace(volume, path='/a"b\\c\nd')
    found = samples(told(status(ledger=ledger(volumes=(odd,)))))
    assert ("memascend_volume_busy_seconds_total", r'rank="0",volume="/a\"b\\c\nd"') in found
