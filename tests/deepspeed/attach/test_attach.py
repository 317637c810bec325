"""From a config to a running attachment: what is refused, what is said, what is built."""

from __future__ import annotations

import copy
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from memascend.config.block import parse_block
from memascend.deepspeed.attach import attach as activation
from memascend.errors import ConfigError
from tests.support.deepspeed_json import WORKING, changed
from tests.support.small_runtime import LIGHT

ARMED_LINE = re.compile(r"\bmemascend \S+ armed: ")


# -- attaching -----------------------------------------------------------------------------------

Attach = Callable[..., activation.Attachment]


@pytest.fixture
def attach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Attach:
    """Attaches as one rank of a job would, without a process group."""
    monkeypatch.delenv("MEMASCEND_CONFIG", raising=False)
    monkeypatch.delenv("MEMASCEND_DISABLE", raising=False)
    caplog.set_level(logging.INFO, logger="memascend")

    def run(*, rank: int = 0, **block: Any) -> activation.Attachment:
        monkeypatch.setattr(activation.dist, "get_rank", lambda: rank)
        config = copy.deepcopy(WORKING)
        config["memascend"] = {**LIGHT, **block}
        return activation.attach(parse_block(config["memascend"]), config, tmp_path / "drive")

    return run


def armed(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records]
    return [line for line in lines if ARMED_LINE.search(line)]


def test_rank_0_says_once_what_it_got(attach: Attach, caplog: pytest.LogCaptureFixture) -> None:
    attach().runtime.close()
    (line,) = armed(caplog)
    for section in ("allocator", "buffer_pool", "direct_nvme", "overflow_check"):
        assert section in line
    assert "engine threads" in line


def test_other_ranks_are_silent(attach: Attach, caplog: pytest.LogCaptureFixture) -> None:
    attach(rank=1).runtime.close()
    assert armed(caplog) == []


def test_the_line_names_only_the_sections_that_are_on(
    attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    attach(overflow_check={"enabled": False}).runtime.close()
    (line,) = armed(caplog)
    assert "overflow_check" not in line


def test_keys_without_a_meaning_are_named(attach: Attach, caplog: pytest.LogCaptureFixture) -> None:
    attach().runtime.close()
    (line,) = [r.getMessage() for r in caplog.records if "no meaning" in r.getMessage()]
    assert line.endswith("aio")


def test_the_drive_is_made_for_its_owner_alone_and_stays_empty(
    attach: Attach, tmp_path: Path
) -> None:
    attachment = attach()
    assert os.stat(tmp_path / "drive").st_mode & 0o077 == 0
    assert list((tmp_path / "drive").iterdir()) == []
    attachment.runtime.close()


def test_two_attachments_share_nothing(attach: Attach) -> None:
    one, other = attach(), attach()
    assert one.runtime.store is not other.runtime.store
    assert one.runtime.arena is not other.runtime.arena
    one.runtime.close()
    other.runtime.close()


def test_staging_folders_of_two_runs_on_one_drive_differ(attach: Attach, tmp_path: Path) -> None:
    one, other = attach(), attach()
    folders = {side.staging_folder(str(tmp_path)) for side in (one, other)}
    assert len(folders) == 2
    assert all(Path(folder).parent == tmp_path for folder in folders)
    one.runtime.close()
    other.runtime.close()


def test_without_our_store_the_staging_folder_is_stocks(attach: Attach, tmp_path: Path) -> None:
    attachment = attach(direct_nvme={"enabled": False}, buffer_pool={"enabled": False})
    assert attachment.runtime.store is None
    assert attachment.staging_folder(str(tmp_path)) == str(tmp_path / "zero_stage_3")


# -- where log lines go --------------------------------------------------------------------------


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """Our logger as an application finds it, restored afterwards."""
    logger = logging.getLogger("memascend")
    level = logger.level  # of a test that armed before
    logger.setLevel(logging.NOTSET)
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(activation.dist, "get_rank", lambda: 0)
    yield logger
    logger.setLevel(level)


def test_in_a_script_without_logging_rank_0_shows_our_lines(
    ours: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Here and not in the fixture: pytest adds its own handler when the test begins.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    activation._show_log_lines()
    activation._show_log_lines()
    logging.getLogger("memascend.deepspeed.attach.attach").info("memascend armed, says the test")
    output = capsys.readouterr()
    assert (output.out + output.err).count("armed, says the test") == 1


def test_an_application_that_set_up_logging_keeps_it(
    ours: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    activation._show_log_lines()
    assert ours.handlers == []
    assert ours.propagate


def test_a_model_from_several_contexts_is_refused() -> None:
    """DeepSpeed gives mixed lists to the first parameter's swapper: the others would not train."""
    from memascend.deepspeed.optimizer.optimizer import _refuse_several_contexts
    from memascend.deepspeed.parameters.swapper import ParameterSwapper

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    first, second = (ParameterSwapper.__new__(ParameterSwapper) for _ in range(2))
    for param in model.parameters():
        param.nvme_swapper = first  # type: ignore[attr-defined]
    _refuse_several_contexts(model)
    for param in model[1].parameters():
        param.nvme_swapper = second  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"2 deepspeed\.zero\.Init contexts"):
        _refuse_several_contexts(model)


def test_a_model_without_a_trainable_parameter_is_refused() -> None:
    """DeepSpeed fails with "max() arg is an empty sequence"."""
    from memascend.deepspeed.optimizer.optimizer import ZeroOptimizer, _refuse_nothing_to_train

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model[0].parameters())
    model[0].weight.requires_grad_(False)
    _refuse_nothing_to_train(model, optimizer)
    model[0].bias.requires_grad_(False)
    told = r"of the 2 tensors given to AdamW none .* of the model's 4 tensors 2 do.*fix: "
    with pytest.raises(ConfigError, match=told):
        ZeroOptimizer(model, optimizer, {}, None, WORKING)


@pytest.mark.parametrize(("rank", "count"), [(0, 1), (1, 0)])
@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("offload_optimizer", "fast_init", True), ("offload_param", "max_in_cpu", 10**6)],
)
def test_a_stated_key_that_is_ignored_is_warned_of_on_rank_0(
    section: str,
    key: str,
    value: object,
    rank: int,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from memascend.deepspeed.optimizer import optimizer as zero_optimizer

    config = changed(f"zero_optimization.{section}.{key}", value)
    config["memascend"] = {"host_memory_limit": "1GiB"}
    optimizer: Any = zero_optimizer.ZeroOptimizer.__new__(
        zero_optimizer.ZeroOptimizer, None, None, None, None, config
    )
    optimizer._ds_config = config
    optimizer.params_in_nvme_and_cpu = True
    optimizer.offload_optimizer_fast_init = key == "fast_init"
    optimizer.max_params_in_cpu = 10**6
    stock = zero_optimizer.DeepSpeedZeroOptimizer_Stage3
    monkeypatch.setattr(stock, "_configure_offloading", lambda *arguments: None)
    monkeypatch.setattr(zero_optimizer.dist, "get_rank", lambda: rank)
    # As a script without logging leaves it: INFO is not shown.
    with caplog.at_level(logging.WARNING, logger="memascend"):
        optimizer._configure_offloading(None, None)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * count
    assert caplog.text.count(f"zero_optimization.{section}.{key} is ignored") == count
    assert optimizer.offload_optimizer_fast_init is False
    assert optimizer.max_params_in_cpu == 0
