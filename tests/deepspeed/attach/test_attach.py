"""From a config to a running attachment: what is refused, what is said, what is built."""

from __future__ import annotations

import copy
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from memascend.base.units import GIB
from memascend.config.block import parse_block
from memascend.config.deepspeed import parse_deepspeed
from memascend.deepspeed.attach import attach as activation
from memascend.errors import ConfigError, MemAscendError
from memascend.ledger.trace import FORWARD, SETUP, read_recording
from memascend.monitor.runs import default_root
from memascend.system import heap
from tests.support.deepspeed_json import WORKING
from tests.support.fake_accelerator import FakeAccelerator
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
        return activation.attach(
            parse_block(config["memascend"]), parse_deepspeed(config), tmp_path / "drive"
        )

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


def test_memory_is_registered_with_any_accelerator_that_copies_by_itself(
    attach: Attach, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = FakeAccelerator()
    monkeypatch.setattr(activation, "get_accelerator", lambda: accelerator)
    attachment = attach()
    assert sum(accelerator.live.values()) == attachment.ledger().held_bytes > 0
    assert attachment.ledger().unregistered_bytes == 0
    assert "100 % registered with the device" in armed(caplog)[0]
    attachment.runtime.close()


def test_memory_that_is_not_registered_is_loud_in_the_armed_line_and_the_ledger(
    attach: Attach, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation, "get_accelerator", lambda: FakeAccelerator(refuses=True))
    attachment = attach()
    ledger = attachment.ledger()
    assert ledger.unregistered_bytes == ledger.held_bytes > 0
    (record,) = [r for r in caplog.records if ARMED_LINE.search(r.getMessage())]
    assert record.levelno == logging.WARNING
    assert "ONLY 0 % registered with the device" in record.getMessage()
    attachment.runtime.close()


@pytest.mark.parametrize(
    ("block", "settings", "sets", "says"),
    [
        ({}, [], True, "512.00 KiB"),
        ({}, ["MALLOC_MMAP_THRESHOLD_"], False, "MALLOC_MMAP_THRESHOLD_"),
        ({"enabled": False}, [], False, "memascend.heap.enabled"),
    ],
    ids=["set", "set by the user", "off"],
)
def test_the_heap_is_set_unless_somebody_says_otherwise(
    attach: Attach,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    block: dict[str, Any],
    settings: list[str],
    sets: bool,
    says: str,
) -> None:
    calls: list[int] = []

    def mallopt(setting: int, value: int) -> int:
        calls.append(value)
        return 1

    monkeypatch.setattr(heap, "_glibc", lambda: SimpleNamespace(mallopt=mallopt))
    monkeypatch.setattr(heap, "_is_serving", lambda libc: True)
    monkeypatch.setattr(activation, "malloc_settings", lambda: settings)
    attachment = attach(heap={"mapped_bytes_min": "512KiB", **block})
    assert (512 << 10 in calls) == bool(calls) == sets
    for text in (armed(caplog)[0], attachment.ledger().heap):
        assert "heap of glibc" in text
        assert says in text
    attachment.runtime.close()


def test_other_ranks_are_silent(attach: Attach, caplog: pytest.LogCaptureFixture) -> None:
    attach(rank=1).runtime.close()
    assert armed(caplog) == []


def test_the_line_names_only_the_sections_that_are_on(
    attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    attach(overflow_check={"enabled": False}).runtime.close()
    attach(micro_batches={"sequences": 2}).runtime.close()
    without, with_slices = armed(caplog)
    assert "overflow_check" not in without
    assert ["micro_batches" in line for line in (without, with_slices)] == [False, True]


def test_keys_without_a_meaning_are_named(attach: Attach, caplog: pytest.LogCaptureFixture) -> None:
    attach().runtime.close()
    (line,) = [r.getMessage() for r in caplog.records if "are ignored" in r.getMessage()]
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


# -- refusals and warnings at the start ----------------------------------------------------------


def test_states_in_bf16_need_adam_before_anything_is_made(tmp_path: Path) -> None:
    config = copy.deepcopy(WORKING) | {"optimizer": {"type": "Lion"}}
    block = parse_block({**LIGHT, "streaming": {"optimizer": {"state_dtype": "bf16"}}})
    with pytest.raises(ConfigError, match=r"state_dtype.*Lion"):
        activation.attach(block, parse_deepspeed(config), tmp_path / "drive")
    assert not (tmp_path / "drive").exists()


def test_a_limit_beyond_the_machine_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = parse_block({"host_memory_limit": "900GiB"})
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(activation.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(activation, "memory_total", lambda: 32 * GIB)
    activation._warn_of_memory(config, 16 * GIB)
    assert caplog.text == ""
    activation._warn_of_memory(config, 900 * GIB)
    assert "host_memory_limit='900GiB'" in caplog.text
    assert "32.00 GiB" in caplog.text


def test_limits_of_several_models_of_a_process_count_together(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="memascend")
    config = parse_block({"host_memory_limit": "16GiB"})
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(activation.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(activation, "memory_total", lambda: 40 * GIB)
    for others_gib, is_warned in ((16, False), (32, True)):
        caplog.clear()
        monkeypatch.setattr(activation.process, "limits_bytes", lambda: others_gib * GIB)  # noqa: B023
        activation._warn_of_memory(config, 16 * GIB)
        assert f"16.00 GiB for this one, {others_gib}.00 GiB for the others" in caplog.text
        assert ("comes to 48.00 GiB" in caplog.text) == is_warned


def test_where_one_rank_cannot_begin_none_does(
    attach: Attach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A report concerns rank 0 alone, so that this rank, which finds nothing wrong, has to be told.
    def all_reduce(tensor: torch.Tensor, op: Any = None) -> None:
        if tensor.numel() == 2:  # which ranks failed
            tensor[0] = 1

    monkeypatch.setattr(activation, "check_agreement", lambda config: None)
    monkeypatch.setattr(activation.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(activation.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(activation.dist, "broadcast", None)
    monkeypatch.setattr(activation.dist, "all_reduce", all_reduce)
    with pytest.raises(MemAscendError, match=r"rank\(s\) 0 cannot begin"):
        attach(rank=1, report=str(tmp_path / "gone" / "report.json"))


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


# -- the trace -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "is_traced"), [(0, True), (1, False)])
def test_rank_0_traces_where_the_environment_asks_for_it(
    attach: Attach,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    is_traced: bool,
) -> None:
    traces = tmp_path / "traces"
    traces.mkdir()
    monkeypatch.setenv("MEMASCEND_TRACE", str(traces))
    monkeypatch.setattr(activation, "get_accelerator", FakeAccelerator)
    attachment = attach(rank=rank)
    with attachment.phase(FORWARD):
        attachment.runtime.new_event().synchronize()
    found = read_recording(traces).marks
    assert [mark.phase for mark in found] == [SETUP, SETUP, FORWARD] * is_traced
    if is_traced:
        assert found[0].measures.components["bounce buffers"] > 0
        assert found[-1].measures.device_wait_s > found[0].measures.device_wait_s == 0
        assert found[-1].measures.drive_wait_s == 0
    attachment.runtime.close()


def test_nothing_is_traced_without_being_asked_for(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEMASCEND_TRACE", raising=False)
    monkeypatch.setattr(activation, "get_accelerator", FakeAccelerator)
    attachment = attach()
    with attachment.phase(FORWARD):
        pass
    assert attachment._trace is None
    attachment.runtime.close()


# -- the status ----------------------------------------------------------------------------------


def test_the_status_goes_to_the_users_folder_or_the_one_named_or_nowhere(
    attach: Attach, tmp_path: Path
) -> None:
    for value, root in ((True, default_root()), (str(tmp_path), tmp_path)):
        attachment = attach(status=value)
        assert attachment.status is not None
        assert attachment.status.place.root == root
        assert attachment.status.place.is_shared == (value is not True)
        attachment.runtime.close()
    attachment = attach(status=False)
    assert attachment.status is None
    attachment.runtime.close()


def test_all_ranks_have_rank_0s_name_for_the_run(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broadcast(tensor: Any, *, src: int) -> None:
        assert src == 0
        tensor.copy_(torch.tensor([1_767_323_045_678, 42]))

    monkeypatch.setattr(activation, "check_agreement", lambda config: None)
    monkeypatch.setattr(activation.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(activation.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(activation.dist, "broadcast", broadcast)
    monkeypatch.setattr(activation.dist, "all_reduce", lambda tensor, op=None: None)
    attachment = attach(rank=1)
    assert attachment.status is not None
    place = attachment.status.place
    assert (place.run, place.rank, place.world_size) == ("20260102T030405.678-42", 1, 2)
    attachment.runtime.close()
