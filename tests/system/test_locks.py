"""Locks are waited for, for so long and no longer."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from memascend.system.locks import lock_within


def test_a_lock_is_had_by_one_alone_and_waited_for(tmp_path: Path) -> None:
    mine, other = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    assert lock_within(mine, 0)
    assert not lock_within(other, 0)
    assert not lock_within(other, 0.05)
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(lock_within(other, 60)))
    waiting.start()
    os.close(mine)
    waiting.join()
    assert found == [True]
    os.close(other)
