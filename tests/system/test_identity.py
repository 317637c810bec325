"""A process is told from one that got its number later, and from those of other machines."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from memascend.system.identity import identify

NOT_STARTED = 0


def test_a_process_is_alive_until_it_has_been_reaped_and_its_number_may_come_again() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        identity = identify(child.pid)
        assert identity.started > NOT_STARTED
        assert identity.is_alive()
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie: nobody works there
        assert identity.is_alive() is False
    assert identity.is_alive() is False
    assert identify(child.pid).started == NOT_STARTED


def test_another_process_of_the_same_number_is_another_one() -> None:
    own = identify(os.getpid())
    assert own.is_alive()
    assert replace(own, started=own.started - 1).is_alive() is False


@pytest.mark.parametrize(
    ("field", "is_alive"), [("host", None), ("boot", False), ("namespace", None)]
)
def test_of_another_machine_boot_or_container(field: str, is_alive: bool | None) -> None:
    own = identify(os.getpid())
    assert replace(own, **{field: "another"}).is_alive() is is_alive


def test_the_name_of_a_program_may_hold_anything(tmp_path: Path) -> None:
    fields = " ".join(str(number) for number in range(4, 53))
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text(f"7 (a) Z\nb) S {fields}\n")
    assert identify(7, tmp_path).started == 22
