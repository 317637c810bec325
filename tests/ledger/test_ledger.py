"""The ledger: sums, the table for the log, the JSON file, and what the kernel says of a process."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from memascend.base.units import MIB, format_nbytes
from memascend.ledger.ledger import Ledger, LedgerRow, describe_plan
from memascend.ledger.traffic import ActivationTraffic
from memascend.plan.derive import PlanRequest, derive
from tests.support.plan_models import decoder

ROWS = (
    LedgerRow("optimizer tiles", planned_bytes=12 * MIB, live_bytes=11 * MIB, peak_bytes=12 * MIB),
    LedgerRow("staging slots", planned_bytes=2 * MIB, live_bytes=2 * MIB, peak_bytes=3 * MIB),
    LedgerRow("gradients", planned_bytes=None, live_bytes=5 * MIB, peak_bytes=5 * MIB),
)
LEDGER = Ledger(
    rows=ROWS,
    limit_bytes=32 * MIB,
    held_bytes=20 * MIB,
    held_bytes_peak=24 * MIB,
    resident_bytes=100 * MIB,
    resident_bytes_peak=130 * MIB,
    drive={"bytes_read": 7},
)
#: The table alone, without the line on a peak above the plan.
TABLE = LEDGER.describe().replace(f"\n  {LEDGER.peak_note}", "")


def cells(table: str) -> dict[str, list[str]]:
    """Columns behind the name, by name; columns are at least two spaces apart."""
    rows = [[cell for cell in line.split("  ") if cell.strip()] for line in table.splitlines()]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


# -- sums ----------------------------------------------------------------------------------------


def test_sums_are_over_all_components_and_no_plan_counts_as_nothing() -> None:
    assert LEDGER.planned_bytes == 14 * MIB
    assert LEDGER.live_bytes == 18 * MIB


def test_what_is_not_ours_is_the_rest_of_the_resident_peak() -> None:
    assert LEDGER.other_bytes_peak == 106 * MIB
    # Memory that was taken and never touched is held and not resident.
    assert replace(LEDGER, resident_bytes_peak=10 * MIB).other_bytes_peak == 0


# -- the table -----------------------------------------------------------------------------------


def test_what_is_on_a_device_and_what_forward_saved_have_a_line_each() -> None:
    assert "device" not in LEDGER.describe()
    saved = ActivationTraffic(3, saved_bytes=9 * MIB, written_bytes=6 * MIB, device_bytes_peak=MIB)
    ledger = replace(LEDGER, device_bytes_peak=7 * MIB, activations=saved)
    found = ledger.describe()
    assert f"device: at most {format_nbytes(7 * MIB)} allocated" in found
    assert (
        f"activations: {format_nbytes(9 * MIB)} saved for backward, {format_nbytes(6 * MIB)}"
        in found
    )
    assert json.loads(json.dumps(ledger.as_dict()))["activations"]["device_bytes_peak"] == MIB


def test_memory_that_the_device_does_not_know_has_a_line_of_its_own() -> None:
    assert "registered" not in LEDGER.describe()
    ledger = replace(LEDGER, unregistered_bytes=5 * MIB)
    (line,) = [line for line in ledger.describe().splitlines() if "registered" in line]
    assert "NOT" in line
    assert format_nbytes(5 * MIB) in line
    assert format_nbytes(LEDGER.held_bytes) in line
    assert ledger.as_dict()["unregistered_bytes"] == 5 * MIB


def test_the_heap_has_a_line_where_somebody_looked() -> None:
    assert "heap" not in LEDGER.describe()
    ledger = replace(LEDGER, heap="heap of glibc 2.36")
    assert "  heap of glibc 2.36" in ledger.describe().splitlines()
    assert ledger.as_dict()["heap"] == "heap of glibc 2.36"


def test_faults_that_were_survived_are_told_by_kind_and_others_not_mentioned() -> None:
    drive = {"bytes_read": 7, "eio_retries": 3, "retries": 0, "slow_spells": 1}
    last = replace(LEDGER, drive=drive).describe().splitlines()[-1]
    assert last.strip() == (
        "the drive's faults: 3 tried again after an I/O error, 1 spells of a drive far slower than "
        "the others"
    )
    assert "faults" not in LEDGER.describe()


def test_the_table_has_a_row_for_each_component_and_two_for_the_sums() -> None:
    found = cells(TABLE)
    assert found == {
        "component": ["planned", "now", "peak"],
        "optimizer tiles": ["12.00 MiB", "11.00 MiB", "12.00 MiB"],
        "staging slots": ["2.00 MiB", "2.00 MiB", "3.00 MiB"],
        "gradients": ["-", "5.00 MiB", "5.00 MiB"],
        "memascend (32.00 MiB)": ["14.00 MiB", "20.00 MiB", "24.00 MiB"],
        "not ours: Python, torch, DeepSpeed": ["-", "80.00 MiB", "106.00 MiB"],
    }


def test_all_lines_of_the_table_are_equally_long() -> None:
    assert len({len(line) for line in TABLE.splitlines()}) == 1


def test_a_peak_above_the_plan_is_explained() -> None:
    assert LEDGER.peak_note.startswith("peak above planned (staging slots): while the model")
    assert LEDGER.peak_note in LEDGER.describe()
    assert LEDGER.as_dict()["peak_note"] == LEDGER.peak_note
    kept = replace(LEDGER, rows=[ROWS[0], ROWS[2]])
    assert kept.peak_note == ""
    assert "above" not in kept.describe()


def test_without_a_limit_the_table_says_so() -> None:
    assert "memascend (no limit)" in cells(replace(LEDGER, limit_bytes=None).describe())


def test_an_empty_ledger_has_a_table_too() -> None:
    assert len(replace(LEDGER, rows=()).describe().splitlines()) == 3


def test_the_planned_table_has_what_is_planned_the_largest_first() -> None:
    plan = derive(decoder(), request=PlanRequest(), limit_bytes=64 * MIB)
    found = cells(describe_plan(plan))
    parts = {name: nbytes for name, nbytes in plan.host.items() if nbytes}
    assert {name: found[name] for name in parts} == {
        name: [format_nbytes(nbytes)] for name, nbytes in parts.items()
    }
    shown = [name for name in found if name in parts]
    assert shown == sorted(parts, key=lambda name: -parts[name])
    assert found["memascend (limit 64.00 MiB)"] == [format_nbytes(plan.host_bytes)]
    assert found["on the drive"] == [format_nbytes(plan.drive_bytes)]


def test_the_planned_table_names_what_is_not_ours() -> None:
    plan = derive(decoder(), request=PlanRequest(optimizer_device="cpu"))
    assert set(plan.not_ours) <= set(cells(describe_plan(plan)))
    assert "memascend (no limit)" in cells(describe_plan(plan))


# -- the file ------------------------------------------------------------------------------------


def test_the_file_holds_every_number_and_the_sums(tmp_path: Path) -> None:
    LEDGER.write(tmp_path / "ledger.json")
    text = (tmp_path / "ledger.json").read_text(encoding="utf-8")
    assert text.endswith("}\n")
    found = json.loads(text)
    assert found == LEDGER.as_dict() | {"rows": found["rows"]}
    assert [LedgerRow(**row) for row in found["rows"]] == list(ROWS)
    assert (found["planned_bytes"], found["live_bytes"]) == (14 * MIB, 18 * MIB)
    assert found["other_bytes_peak"] == 106 * MIB
    assert found["drive"] == {"bytes_read": 7}


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        LEDGER.write(tmp_path / "missing" / "ledger.json")


@pytest.mark.parametrize("kind", ["link", "link to nowhere", "fifo"])
def test_a_link_or_device_in_the_place_of_the_file_is_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "ledger.json"
    (tmp_path / "victim").write_text("mine")
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("victim" if kind == "link" else "nowhere")
    with pytest.raises(FileExistsError):
        LEDGER.write(path)
    assert not path.is_file() or path.is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"victim", "ledger.json"}
    assert (tmp_path / "victim").read_text() == "mine"


def test_an_older_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "ledger.json").write_text("old")
    LEDGER.write(tmp_path / "ledger.json")
    assert json.loads((tmp_path / "ledger.json").read_text(encoding="utf-8"))["drive"]
