"""What has programs that tests start begin sooner: see sitecustomize.py beside this."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
