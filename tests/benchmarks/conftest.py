"""Puts the folder of the benchmarks on the import path, as running one does."""

from __future__ import annotations

import sys

from tests.support.benchmarks import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))
