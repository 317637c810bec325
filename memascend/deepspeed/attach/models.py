"""What the models of one process have between them: the machine's memory, and names of reports.

Each has a runtime and a limit of its own, and none knows of another but through here.
"""

from __future__ import annotations

import weakref
from pathlib import Path

#: Of each model that trains or is used: its limit in bytes, 0 without one.
_limits: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
#: Reports that models of this process have written or are going to write.
_reports: set[Path] = set()


def join(model: object, limit_bytes: int | None) -> None:
    """Note a model, which this keeps not alive, and the host memory that it may take."""
    _limits[model] = limit_bytes or 0


def leave(model: object) -> None:
    """Note that a model is through and gives its memory back."""
    _limits.pop(model, None)


def limits_bytes() -> int:
    """Return what all models that are here may take together."""
    return sum(_limits.values())


def claim_report(path: Path) -> Path:
    """Return the file for a model's report: the path, or beside it where another model has that.

    Args:
        path: As the block names it. The second model of a process gets "report-2.json" for it.
    """
    path = claimed = path.absolute()
    number = 1
    while claimed in _reports:
        number += 1
        claimed = path.with_name(f"{path.stem}-{number}{path.suffix}")
    _reports.add(claimed)
    return claimed
