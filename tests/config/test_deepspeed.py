"""The DeepSpeed JSON, or a dict from Python, becomes one frozen set of settings."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Any

import pytest

from memascend.config.deepspeed import DeepSpeedSettings, OffloadParam, parse_deepspeed
from memascend.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


class Device(str, enum.Enum):
    nvme = "nvme"


class Stage(int, enum.Enum):
    weights = 3


class Dumped:
    """Stands for one of DeepSpeed's configuration objects."""

    def model_dump(self, *, exclude_unset: bool, by_alias: bool) -> dict[str, Any]:
        assert exclude_unset
        assert by_alias
        return {"device": Device.nvme}


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


def refusal(ds_config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_deepspeed(ds_config)
    return str(caught.value)


@pytest.mark.parametrize("empty", [{}, None, 7, {"aio": None}, {"zero_optimization": {}}])
def test_a_file_that_says_nothing_has_the_defaults(empty: object) -> None:
    found = parse_deepspeed(empty)
    assert (found.zero_optimization.stage, found.aio.block_size) == (0, 1 << 20)
    assert (found.precision, found.accumulation_steps(1)) == ("fp32", 1)


@pytest.mark.parametrize("left", [None, "auto"])
def test_a_key_left_to_the_trainer_has_its_default_and_is_not_stated(left: object) -> None:
    found = parse_deepspeed(zero(sub_group_size=left, stage=3)).zero_optimization
    assert found.sub_group_size == 10**9
    assert found.stated == {"stage"}
    assert found.left_to_trainer == (set() if left is None else {"sub_group_size"})


def test_the_defaults_are_deepspeeds() -> None:
    config = pytest.importorskip("deepspeed.runtime.zero.config")
    offload = pytest.importorskip("deepspeed.runtime.zero.offload_config")
    aio = pytest.importorskip("deepspeed.runtime.swap_tensor.aio_config").get_aio_config({})
    ours, upstream = DeepSpeedSettings(), config.DeepSpeedZeroConfig(stage=3)
    names = {
        "stage3_max_reuse_distance": "max_reuse_distance",
        "stage3_max_live_parameters": "max_live_parameters",
        "stage3_prefetch_bucket_size": "prefetch_bucket_size",
    }
    for name in ("sub_group_size", "reduce_bucket_size", "contiguous_gradients", *names):
        expected = getattr(upstream, names.get(name, name))
        assert getattr(ours.zero_optimization, name) == expected, name
    for part, kind in (
        (ours.zero_optimization.offload_param, offload.DeepSpeedZeroOffloadParamConfig),
        (ours.zero_optimization.offload_optimizer, offload.DeepSpeedZeroOffloadOptimizerConfig),
    ):
        for name in type(part).model_fields.keys() - {"left_to_trainer", "device"}:
            assert getattr(part, name) == getattr(kind(), name), name
    for name, value in aio.items():
        assert getattr(ours.aio, name) == value, name


@pytest.mark.parametrize("number", [10**9, 1e9, "1e9", "1000000000", "1E+9"])
def test_a_whole_number_is_read_however_it_is_written(number: object) -> None:
    found = parse_deepspeed(zero(reduce_bucket_size=number))
    assert found.zero_optimization.reduce_bucket_size == 10**9


@pytest.mark.parametrize(
    "wrong", [True, 1.5, -1, "-1", "many", "", [], {}, float("inf"), float("nan"), "9" * 50_000]
)
def test_anything_else_is_no_whole_number(wrong: object) -> None:
    text = refusal(zero(reduce_bucket_size=wrong))
    assert text.startswith("zero_optimization.reduce_bucket_size: ")
    assert "a whole number, at least 0" in text
    assert len(text) < 700


@pytest.mark.parametrize(
    ("written", "read"),
    [(True, True), ("true", True), (1, True), ("False", False), (0, False), ("off", False)],
)
def test_a_switch_is_read_however_it_is_written(written: object, read: bool) -> None:
    assert parse_deepspeed({"bf16": {"enabled": written}}).bf16.enabled is read


def test_enums_and_objects_from_python_are_read() -> None:
    found = parse_deepspeed(zero(stage=Stage.weights, offload_param=Dumped()))
    assert found.zero_optimization.stage == 3
    assert found.zero_optimization.offload_param == OffloadParam(device="nvme")


def test_deepspeeds_own_enums_and_objects_are_read() -> None:
    offload = pytest.importorskip("deepspeed.runtime.zero.offload_config")
    from deepspeed.runtime.config import DtypeEnum

    param = offload.DeepSpeedZeroOffloadParamConfig(device="nvme", nvme_path="/drive")
    found = parse_deepspeed(
        zero(offload_param=param, offload_optimizer={"device": offload.OffloadDeviceEnum.cpu})
        | {"communication_data_type": DtypeEnum.bf16}
    )
    assert found.zero_optimization.offload_param.nvme_path == "/drive"
    assert "max_in_cpu" not in found.zero_optimization.offload_param.stated
    assert found.zero_optimization.offload_optimizer.device == "cpu"
    assert found.communication_data_type == "bf16"


def test_an_object_of_deepspeeds_is_read_by_the_keys_of_its_json() -> None:
    config = pytest.importorskip("deepspeed.runtime.zero.config")
    keys = {
        "stage3_max_reuse_distance": 7,
        "stage3_max_live_parameters": 8,
        "stage3_prefetch_bucket_size": 9,
    }
    without_prefix = {key.removeprefix("stage3_"): value for key, value in keys.items()}
    for content in (config.DeepSpeedZeroConfig(**keys), keys, without_prefix):
        found = parse_deepspeed({"zero_optimization": content}).zero_optimization
        assert {key: getattr(found, key) for key in keys} == keys


def test_a_precision_has_several_names_and_may_be_torchs() -> None:
    torch = pytest.importorskip("torch")
    kinds = ["bf16", "bfloat16", "torch.bfloat16", "BF16", torch.bfloat16]
    for kind in kinds:
        assert parse_deepspeed({"communication_data_type": kind}).communication_data_type == "bf16"
    found = [
        parse_deepspeed({"data_types": {"grad_accum_dtype": dtype}}).data_types.grad_accum_dtype
        for dtype in (torch.float16, torch.half, torch.float32)
    ]
    assert found == ["fp16", "fp16", "fp32"]


def test_refusals_name_the_whole_key_the_value_and_the_nearest_one() -> None:
    text = refusal(zero(offload_param={"device": "nvmee"}))
    for part in ("zero_optimization.offload_param.device", '"nvmee"', '"cpu"', 'mean "nvme"'):
        assert part in text
    text = refusal({"data_types": {"grad_accum_dtype": "int8"}})
    assert text.startswith('data_types.grad_accum_dtype: "int8" is not allowed')
    assert refusal({"zero_optimization": True}).startswith("zero_optimization: true is not allow")
    assert 'bf16.enabled: "maybe" is not allowed' in refusal({"bf16": {"enabled": "maybe"}})
    with pytest.raises(ConfigError, match=r"optimizer\.params\.torch_adam: 7 is not allowed"):
        _ = parse_deepspeed({"optimizer": {"params": {"torch_adam": 7}}}).adam


def test_a_precision_that_is_on_goes_before_one_left_to_the_trainer() -> None:
    auto, on = {"enabled": "auto"}, {"enabled": True}
    assert parse_deepspeed({"bf16": auto, "fp16": on}).precision == "fp16"
    assert parse_deepspeed({"bf16": auto, "fp16": auto}).precision == "bf16"
    assert parse_deepspeed({"bfloat16": on}).precision == "bf16"


def test_micro_steps_follow_from_the_batch_sizes() -> None:
    sizes = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}
    assert parse_deepspeed(sizes).accumulation_steps(4) == 8
    assert parse_deepspeed(sizes | {"gradient_accumulation_steps": 3}).accumulation_steps(4) == 3


def test_every_configuration_of_ours_is_read() -> None:
    found = sorted((ROOT / "configs").glob("*.json"))
    assert found
    for path in found:
        assert parse_deepspeed(json.loads(path.read_text())).zero_optimization.stage == 3
