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


ON_DRIVE = SimpleNamespace(device="nvme")


def arguments(**changes: Any) -> dict[str, Any]:
    given = {
        "init_optimizer": None,
        "offload_param_config": ON_DRIVE,
        "offload_optimizer_config": ON_DRIVE,
        "offload_ratio": 1.0,
    }
    return given | changes


def muon() -> Any:
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    return MuonWithAuxAdam.__new__(MuonWithAuxAdam)


DECLINED = {"init_optimizer": muon, "offload_ratio": lambda: 0.5}


@pytest.mark.parametrize("name", DECLINED)
def test_a_stream_that_cannot_serve_is_named_and_left_out(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, optimizer = streams.choose_streams(parse_block({}), arguments(**{name: DECLINED[name]()}))
    assert not optimizer
    assert "streaming.optimizer is not used" in caplog.text


@pytest.mark.parametrize("name", DECLINED)
def test_a_limit_that_needs_it_is_refused(name: str) -> None:
    """Whole sub-groups and their copies would exceed it, some of them unseen."""
    config = parse_block({"host_memory_limit": "2GiB"})
    assert streams.choose_streams(config, arguments()) == (True, True)
    with pytest.raises(ConfigError, match=r"host_memory_limit='2GiB' cannot be kept: streaming\."):
        streams.choose_streams(config, arguments(**{name: DECLINED[name]()}))


@pytest.mark.parametrize("offload", [None, SimpleNamespace(device="cpu")])
def test_an_optimizer_that_is_not_on_a_drive_has_no_streams(
    offload: Any, caplog: pytest.LogCaptureFixture
) -> None:
    found = streams.choose_streams(parse_block({}), arguments(offload_optimizer_config=offload))
    assert found == (False, False)
    assert caplog.text == ""


def test_without_the_pool_only_an_optimizer_whose_parameters_are_elsewhere_is_streamed() -> None:
    config = parse_block({"buffer_pool": {"enabled": False}})
    assert streams.choose_streams(config, arguments()) == (True, False)
    assert streams.choose_streams(config, arguments(offload_param_config=None)) == (True, True)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_master_weights_in_16_bits_need_the_stream_of_the_optimizer(precision: str) -> None:
    narrow = {f"{precision}_master_weights_and_gradients": True}
    assert streams.choose_streams(parse_block({}), arguments(**narrow)) == (True, True)
    told = rf"{precision}_master_weights_and_grads keeps .*it needs buffer_pool.*Change that"
    with pytest.raises(ConfigError, match=told):
        streams.choose_streams(
            parse_block({"buffer_pool": {"enabled": False}}), arguments(**narrow)
        )


@pytest.mark.parametrize("name", DECLINED)
def test_states_in_bf16_need_the_stream_of_the_optimizer(name: str) -> None:
    config = parse_block({"streaming": {"optimizer": {"state_dtype": "bf16"}}})
    assert streams.choose_streams(config, arguments()) == (True, True)
    with pytest.raises(ConfigError, match="state_dtype") as caught:
        streams.choose_streams(config, arguments(**{name: DECLINED[name]()}))
    assert "streaming.optimizer cannot serve" in str(caught.value)
