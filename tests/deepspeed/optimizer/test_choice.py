"""Which streams serve, and what a stated limit refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("deepspeed")

from memascend.config.block import parse_block
from memascend.deepspeed.optimizer import choice as streams
from memascend.errors import ConfigError


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(streams, "is_autocast_initialized", lambda: False)


def optimizer_of(**changes: Any) -> Any:
    facts = {"use_muon": False, "params_in_nvme_and_cpu": True, "partial_offload": 1.0}
    return SimpleNamespace(**facts | changes)


DECLINED = {"use_muon": True, "partial_offload": 0.5}


@pytest.mark.parametrize("name", DECLINED)
def test_a_stream_that_cannot_serve_is_named_and_left_out(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = streams.streams_in_use(parse_block({}), optimizer_of(**{name: DECLINED[name]}))
    assert not found.optimizer
    assert "streaming.optimizer is not used" in caplog.text


@pytest.mark.parametrize("name", DECLINED)
def test_a_limit_that_needs_it_is_refused(name: str) -> None:
    """Whole sub-groups and their copies would exceed it, some of them unseen."""
    config = parse_block({"host_memory_limit": "2GiB"})
    assert streams.streams_in_use(config, optimizer_of()).optimizer
    with pytest.raises(ConfigError, match=r"host_memory_limit='2GiB' cannot be kept: streaming\."):
        streams.streams_in_use(config, optimizer_of(**{name: DECLINED[name]}))
