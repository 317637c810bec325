"""Which streams serve, and what a stated limit refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from memascend.config.block import MemAscendConfig, parse_block
from memascend.config.deepspeed import parse_deepspeed
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


def muon(*flags: tuple[bool, bool], aux_optimizer: Any = None) -> Any:
    """Muon with a group for each pair of flags: the group's, and that of its parameter."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    optimizer = MuonWithAuxAdam.__new__(MuonWithAuxAdam)
    optimizer.param_groups = [
        {"use_muon": of_group, "params": [SimpleNamespace(use_muon=of_param)]}
        for of_group, of_param in flags or [(True, True)]
    ]
    optimizer.aux_optimizer = aux_optimizer
    return optimizer


def mixed_muon() -> Any:
    return muon((True, False))


DECLINED = {"init_optimizer": mixed_muon, "offload_ratio": lambda: 0.5}
#: By words of the reason: the block, and the arguments.
NOT_BY_MATRIX: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "save_muon_momentum_buffer_in_memory": ({}, {"save_muon_momentum_buffer_in_memory": True}),
    "streaming.gradients": ({"streaming": {"gradients": {"enabled": False}}}, {}),
    "with and without use_muon": ({}, {"init_optimizer": mixed_muon}),
    "another optimizer than DeepSpeedCPUAdam": (
        {},
        {"init_optimizer": lambda: muon((True, True), (False, False))},
    ),
    "offload_optimizer.ratio": ({}, {"offload_ratio": 0.5}),
}


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


def with_muon(**changes: Any) -> dict[str, Any]:
    changed = {name: value() if callable(value) else value for name, value in changes.items()}
    return arguments(**{"init_optimizer": muon()} | changed)


def test_muon_is_streamed_and_may_have_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    config = parse_block({"host_memory_limit": "2GiB"})
    assert streams.choose_streams(config, with_muon()) == (True, True)
    adam = DeepSpeedCPUAdam.__new__(DeepSpeedCPUAdam)
    both = muon((True, True), (False, False), aux_optimizer=adam)
    assert streams.choose_streams(config, with_muon(init_optimizer=both)) == (True, True)
    assert caplog.text == ""


@pytest.mark.parametrize("words", NOT_BY_MATRIX)
def test_muon_that_is_not_streamed_has_neither_stream_and_the_reason_is_told(
    words: str, caplog: pytest.LogCaptureFixture
) -> None:
    block, changes = NOT_BY_MATRIX[words]
    found = streams.choose_streams(parse_block(block), with_muon(**changes))
    assert found == (False, False)
    assert words in caplog.text
    if not block:
        limited = parse_block({"host_memory_limit": "2GiB"})
        with pytest.raises(ConfigError, match=r"host_memory_limit='2GiB' cannot be kept") as caught:
            streams.choose_streams(limited, with_muon(**changes))
        assert words in str(caught.value)


def test_a_release_without_the_function_steps_muon_in_whole_sub_groups(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(streams, "is_able", lambda ability: ability is not streams.MUON_BY_MATRIX)
    assert streams.choose_streams(parse_block({}), with_muon()) == (False, False)
    assert "Muon needs whole gradients" in caplog.text


def test_a_subclass_of_muon_may_step_in_another_way_and_keeps_whole_sub_groups() -> None:
    optimizer = muon()
    optimizer.__class__ = type("Derived", (type(optimizer),), {})
    found = streams.choose_streams(parse_block({}), with_muon(init_optimizer=optimizer))
    assert found == (False, False)


def test_master_weights_in_16_bits_are_refused_with_muon() -> None:
    narrow = with_muon(bf16_master_weights_and_gradients=True)
    with pytest.raises(ConfigError, match=r"bf16_master_weights_and_grads .*Muon needs master"):
        streams.choose_streams(parse_block({}), narrow)


@pytest.mark.parametrize("reduction", ["pass", "slice"])
def test_a_torch_that_adds_up_in_16_bits_cannot_have_slices_in_fp32(
    monkeypatch: pytest.MonkeyPatch, reduction: str
) -> None:
    section = {"micro_batches": {"count": 2, "reduction": reduction}}
    config = MemAscendConfig.model_validate(section)
    dtypes = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    settings = parse_deepspeed(dtypes | {"zero_optimization": {"stage": 3}})
    wide = {"communication_data_type": torch.float32}
    assert streams.reduction_of_sums(config, settings) == (wide if reduction == "pass" else {})
    older = SimpleNamespace(Tensor=object, float32=torch.float32, __version__="2.5.0")
    monkeypatch.setattr(streams, "torch", older)
    with pytest.raises(ConfigError, match=r"torch 2\.5\.0 is installed"):
        streams.reduction_of_sums(config, settings)
    assert streams.reduction_of_sums(MemAscendConfig(), settings) == {}
