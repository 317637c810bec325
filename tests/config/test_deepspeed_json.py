"""Reading a DeepSpeed configuration: JSON, or what Python programs write into a dict."""

from __future__ import annotations

import enum
from typing import Any

import pytest

from memascend.config.deepspeed_json import device, flag, precision, section, value, whole
from memascend.errors import ConfigError


class Device(str, enum.Enum):
    nvme = "nvme"


class Stage(int, enum.Enum):
    weights = 3


class Dumped:
    """Stands for one of DeepSpeed's configuration objects."""

    def model_dump(self, *, exclude_unset: bool) -> dict[str, Any]:
        assert exclude_unset
        return {"device": Device.nvme}


@pytest.mark.parametrize("missing", [{}, {"key": None}, {"key": "auto"}])
def test_a_key_left_out_or_left_to_the_trainer_has_its_default(missing: dict[str, Any]) -> None:
    assert value(missing, "key", "default") == "default"
    assert whole(missing, "key", 7) == 7
    assert flag(missing, "key", True) is True
    assert device(missing) == "none"
    assert precision(missing, "key", "fp16") == "fp16"


def test_an_enum_is_its_value() -> None:
    assert device({"device": Device.nvme}) == "nvme"
    assert str(value({"device": Device.nvme}, "device", "none")) == "nvme"
    assert whole({"stage": Stage.weights}, "stage", 0) == 3


@pytest.mark.parametrize("number", [10**9, 1e9, "1e9", "1000000000", "1E+9"])
def test_a_whole_number_is_read_however_it_is_written(number: object) -> None:
    assert whole({"key": number}, "key", 0) == 10**9


@pytest.mark.parametrize(
    "wrong", [True, 1.5, -1, "-1", "many", "", [], {}, float("inf"), float("nan"), "9" * 50_000]
)
def test_anything_else_is_no_whole_number(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"^key: .*whole number of at least 0") as caught:
        whole({"key": wrong}, "key", 0)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("written", "read"),
    [(True, True), ("true", True), (1, True), ("False", False), (0, False), ("off", False)],
)
def test_a_flag_is_read_however_it_is_written(written: object, read: bool) -> None:
    assert flag({"key": written}, "key", not read) is read


def test_a_flag_that_is_neither_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'key: "maybe" is not allowed.*true or false'):
        flag({"key": "maybe"}, "key", False)


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "torch.bfloat16"])
def test_a_precision_has_several_names(name: str) -> None:
    assert precision({"key": name}, "key", "fp32") == "bf16"


def test_torchs_own_dtypes_are_precisions() -> None:
    torch = pytest.importorskip("torch")
    found = [
        precision({"key": dtype}, "key", "none")
        for dtype in (torch.bfloat16, torch.float16, torch.half, torch.float32)
    ]
    assert found == ["bf16", "fp16", "fp16", "fp32"]


def test_deepspeeds_own_enums_and_objects_are_read() -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.config import DtypeEnum
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadParamConfig,
        OffloadDeviceEnum,
    )

    config = {"offload_param": DeepSpeedZeroOffloadParamConfig(device="nvme", nvme_path="/drive")}
    offload = section(config, "offload_param")
    assert device(offload) == "nvme"
    assert "max_in_cpu" not in offload
    assert device({"device": OffloadDeviceEnum.cpu}) == "cpu"
    assert precision({"dtype": DtypeEnum.bf16}, "dtype", "fp32") == "bf16"


def test_a_section_that_is_left_out_is_empty() -> None:
    assert section({}, "aio") == section({"aio": None}, "aio") == {}
    assert section({"key": Dumped()}, "key") == {"device": Device.nvme}


def test_refusals_name_the_whole_key_the_value_and_the_nearest_one() -> None:
    zero = section(
        {"zero_optimization": {"offload_param": {"device": "nvmee"}}}, "zero_optimization"
    )
    with pytest.raises(ConfigError) as caught:
        device(section(zero, "offload_param"))
    for part in ("zero_optimization.offload_param.device", '"nvmee"', '"cpu"', 'mean "nvme"'):
        assert part in str(caught.value)
    assert precision({"communication_data_type": "BF16"}, "communication_data_type", "") == "bf16"
    with pytest.raises(ConfigError, match=r"data_types\.grad_accum_dtype: .*float33.*float32"):
        precision(section({"data_types": {"grad_accum_dtype": "float33"}}, "data_types"),
                  "grad_accum_dtype", "bf16")  # fmt: skip
    with pytest.raises(ConfigError, match=r"zero_optimization: true is not allowed.*object"):
        section({"zero_optimization": True}, "zero_optimization")
