"""Where programs that tests start find torch's compiler late: see sitecustomize.py beside this."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
