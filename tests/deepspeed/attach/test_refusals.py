"""What cannot work with an active block is refused, with the keys and the remedy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed")

from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadParamConfig,
    OffloadDeviceEnum,
)

from memascend.config.block import parse_block
from memascend.config.deepspeed import parse_deepspeed
from memascend.deepspeed.attach.refusals import check_config, check_report
from memascend.errors import ConfigError
from tests.support.deepspeed_json import WORKING, changed, without

AS_AN_OBJECT = DeepSpeedZeroOffloadParamConfig(device="nvme", nvme_path="/drive")


@pytest.mark.parametrize(
    "config",
    [
        WORKING,
        without("zero_optimization.offload_optimizer"),
        without("zero_optimization.offload_param"),
        changed("zero_optimization.offload_param.device", "cpu"),
        changed("zero_optimization.offload_optimizer.device", "none"),
        changed("zero_optimization.zenflow", None),
        changed("zero_optimization.offload_optimizer.super_offload", False),
        changed("aio.use_gds", False),
        changed("compile.deepcompile", False),
        without("aio"),
        # As Python programs write it.
        changed("zero_optimization.stage", ZeroStageEnum.weights),
        changed("zero_optimization.offload_param.device", OffloadDeviceEnum.nvme),
        changed("zero_optimization.offload_param", AS_AN_OBJECT),
        changed("zero_optimization.offload_optimizer.super_offload", "false"),
    ],
)
def test_what_can_work_is_not_refused(config: dict[str, Any]) -> None:
    check_config(parse_deepspeed(config))


CPU_ONLY = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
TURN_OFF = r'turn memascend off with "memascend": \{"enabled": false\}'


@pytest.mark.parametrize(
    ("config", "key", "remedy"),
    [
        (changed("zero_optimization.stage", 2), r"zero_optimization\.stage is 2", "Set it to 3"),
        (without("zero_optimization"), r"zero_optimization\.stage is 0", TURN_OFF),
        (
            changed("zero_optimization", CPU_ONLY),
            r"zero_optimization\.offload_param\.device.*offload_optimizer\.device",
            "Set at least one",
        ),
        (changed("zero_optimization", {"stage": 3}), "nothing to do", TURN_OFF),
        (
            changed("zero_optimization.stage", ZeroStageEnum.gradients),
            r"zero_optimization\.stage is 2",
            "Set it to 3",
        ),
        (
            changed("zero_optimization.offload_param.device", "nvm"),
            r'zero_optimization\.offload_param\.device: "nvm"',
            'Did you mean "nvme"',
        ),
        (
            without("zero_optimization.offload_param.nvme_path"),
            r"zero_optimization\.offload_param\.nvme_path is missing",
            "name a directory",
        ),
        (
            without("zero_optimization.offload_optimizer.nvme_path"),
            r"zero_optimization\.offload_optimizer\.nvme_path is missing",
            "name a directory",
        ),
        (
            changed("zero_optimization.zenflow", {"topk_ratio": 0.1}),
            r"zero_optimization\.zenflow",
            r"Remove zero_optimization\.zenflow",
        ),
        (
            changed("zero_optimization.offload_optimizer.super_offload", True),
            r"offload_optimizer\.super_offload",
            r"Remove zero_optimization\.offload_optimizer\.super_offload",
        ),
        *(
            (
                changed("optimizer.type", name),
                f"the optimizer {name} keeps quantized or paged states of its own",
                r'memascend\.streaming\.optimizer\.state_dtype to "int8"',
            )
            for name in ("AdamW8bit", "adamw_4bit", "PagedAdamW", "AdamWFp8")
        ),
        (
            changed("optimizer.type", "Lamb"),
            r'"Lamb" steps tensors on a GPU alone, and .*offload_optimizer\.device "nvme"',
            'Set optimizer.type to "AdamW"',
        ),
        (changed("aio.use_gds", True), r"aio\.use_gds", r"Remove aio\.use_gds"),
        (
            changed("checkpoint.writer.decoupled", True),
            r"checkpoint\.writer\.decoupled",
            r"Remove checkpoint\.writer\.decoupled",
        ),
        (changed("compile.deepcompile", True), r"compile\.deepcompile", TURN_OFF),
    ],
)
def test_what_cannot_work_is_refused_with_key_and_remedy(
    config: dict[str, Any], key: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_config(parse_deepspeed(config))
    assert re.search(key, str(refusal.value), re.DOTALL)
    assert re.search(remedy, str(refusal.value))


@pytest.mark.parametrize("name", ["no/such/dir/report.json", ".", "a file/report.json", "a link"])
def test_a_report_that_cannot_be_written_is_refused_at_the_start(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a file").touch(0o777)
    (tmp_path / "a link").symlink_to("a file")
    with pytest.raises(ConfigError, match=r"memascend\.report=.* cannot be written"):
        check_report(parse_block({"report": name}))
    check_report(parse_block({"report": "report.json"}))
    check_report(parse_block({}))
