"""The parity bench: worker groups shared by every test of the run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .workers import Bench


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("parity"))
    yield bench
    bench.stop()
