"""State shared by the models of one process: their memory limits, and the names of their reports.

Each model has its own runtime and limit; this module is their only connection.
"""

from __future__ import annotations

import weakref
from pathlib import Path

#: Limit of each active model in bytes, 0 without one.
_limits: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
#: Reports that models of this process have written or are going to write.
_reports: set[Path] = set()


def join(model: object, limit_bytes: int | None) -> None:
    """Note a model and its limit; does not keep the model alive."""
    _limits[model] = limit_bytes or 0


def leave(model: object) -> None:
    """Note that a model is finished and frees its memory."""
    _limits.pop(model, None)


def limits_bytes() -> int:
    """Return the sum of the limits of all active models, in bytes."""
    return sum(_limits.values())


def claim_report(path: Path) -> Path:
    """Return the file of a model's report; that of a second model is "report-2.json", say."""
    path = claimed = path.absolute()
    number = 1
    while claimed in _reports:
        number += 1
        claimed = path.with_name(f"{path.stem}-{number}{path.suffix}")
    _reports.add(claimed)
    return claimed
