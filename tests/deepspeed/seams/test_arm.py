"""Arming DeepSpeed: all or nothing, only over definitions that are known, and undone completely."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

deepspeed = pytest.importorskip("deepspeed")

from memascend.config import block  # noqa: E402
from memascend.config.block import parse_block  # noqa: E402
from memascend.deepspeed.seams import arm as seams  # noqa: E402
from memascend.deepspeed.seams import compare as comparing  # noqa: E402
from memascend.deepspeed.seams import fingerprints, table  # noqa: E402
from memascend.deepspeed.seams.fingerprint import resolve  # noqa: E402
from memascend.deepspeed.seams.table import Seam  # noqa: E402
from memascend.errors import ConfigError, UnsupportedDeepSpeedError  # noqa: E402
from tests.support.source_tree import ROOT as REPOSITORY  # noqa: E402

BLOCK_OFF: dict[str, Any] = {"memascend": {"enabled": False}}
# For tests that compare all definitions again and again, to find one that differs.
DEFINITIONS_ONCE = functools.cache(comparing.definitions)


def targets() -> list[Any]:
    return [seams.find(seam) for seam in seams.SEAMS]


@pytest.fixture(autouse=True)
def stock() -> Iterator[list[Any]]:
    """What stands at each seam while disarmed; every test leaves it so."""
    seams.disarm()
    found = targets()
    yield found
    seams.disarm()
    assert all(now is then for now, then in zip(targets(), found, strict=True))


def test_arming_replaces_every_target_and_disarming_restores_it(stock: list[Any]) -> None:
    seams.arm()
    assert not any(now is then for now, then in zip(targets(), stock, strict=True))
    assert seams.is_armed()
    seams.disarm()
    assert all(now is then for now, then in zip(targets(), stock, strict=True))
    assert not seams.is_armed()


def test_arming_twice_wraps_once(stock: list[Any]) -> None:
    seams.arm()
    first = targets()
    seams.arm()
    assert all(now is then for now, then in zip(targets(), first, strict=True))


def test_arming_again_after_disarming_works(stock: list[Any]) -> None:
    for _ in range(2):
        seams.arm()
        seams.disarm()
    seams.arm()
    assert seams.is_armed()


def test_classes_derived_from_the_stock_optimizer_keep_it_as_their_base() -> None:
    seams.arm()
    superoffload = resolve(
        "deepspeed.runtime.superoffload.superoffload_stage3", "SuperOffloadOptimizer_Stage3"
    )
    assert not any(base.__module__.startswith("memascend") for base in superoffload.__mro__)


# -- what must be known --------------------------------------------------------------------------


def test_the_installed_release_is_known(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        seams.check_fingerprints()
    assert caplog.records == []


def test_an_unknown_version_with_known_definitions_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(deepspeed, "__version__", "0.99.1")
    with caplog.at_level(logging.WARNING):
        seams.arm()
        seams.arm()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "0.99.1" in record.getMessage()
    assert fingerprints.VERSIONS[-1] in record.getMessage()
    assert seams.is_armed()


@pytest.fixture
def without_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every definition is looked for, once for all tests."""
    monkeypatch.setattr(fingerprints, "DIGESTS", {})
    monkeypatch.setattr(comparing, "definitions", lambda: dict(DEFINITIONS_ONCE()))


@pytest.mark.usefixtures("without_digests")
@pytest.mark.parametrize("name", sorted(fingerprints.KNOWN))
def test_a_changed_definition_is_refused_by_name_and_nothing_is_replaced(
    name: str, stock: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = DEFINITIONS_ONCE() | {name: "0" * 16}
    monkeypatch.setattr(comparing, "definitions", lambda: changed)
    with pytest.raises(UnsupportedDeepSpeedError) as refusal:
        seams.arm()
    text = str(refusal.value)
    assert name in text
    assert f"DeepSpeed {deepspeed.__version__} was patched" in text
    assert "MEMASCEND_DISABLE=1" in text
    assert all(now is then for now, then in zip(targets(), stock, strict=True))
    assert not seams.is_armed()


def test_a_definition_that_is_gone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3.no_such_step")
    monkeypatch.setattr(table, "WATCHED", (*table.WATCHED, gone))
    monkeypatch.setattr(fingerprints, "DIGESTS", {})
    with pytest.raises(UnsupportedDeepSpeedError, match=r"no_such_step \(missing\)"):
        seams.arm()


def test_all_differences_are_logged_for_who_wants_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    changed = dict.fromkeys(fingerprints.KNOWN, "0" * 16)
    monkeypatch.setattr(fingerprints, "DIGESTS", {})
    monkeypatch.setattr(comparing, "definitions", lambda: changed)
    with (
        caplog.at_level(logging.DEBUG, logger="memascend"),
        pytest.raises(UnsupportedDeepSpeedError),
    ):
        seams.arm()
    for name, found in changed.items():
        assert f"{name} ({found})" in caplog.text


# -- what an older release lacks -------------------------------------------------------------------

OLD_CLASS = f"{__name__}:wrap_with_name"


def wrap_with_name(original: Any) -> tuple[str, Any]:
    return "ours", original


def test_a_seam_over_what_a_release_lacks_is_left_out(
    stock: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = Seam("absent", "json", "no_such_name", "r", OLD_CLASS)
    monkeypatch.setattr(seams, "SEAMS", (*seams.SEAMS, absent))
    seams.arm()
    assert seams.is_armed()
    import json

    assert not hasattr(json, "no_such_name")
    seams.disarm()
    monkeypatch.undo()


def test_a_seam_stands_where_an_older_release_has_its_definition(
    stock: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Seam("old", "json", "no_such_name", "r", OLD_CLASS, older="dumps")
    monkeypatch.setattr(seams, "SEAMS", (*seams.SEAMS, old))
    import json

    before = json.dumps
    seams.arm()
    try:
        assert json.dumps == ("ours", before)
    finally:
        seams.disarm()
    assert json.dumps is before
    monkeypatch.undo()


#: A DeepSpeed that has nothing of all that ours relies on, and a script with a block.
OLD_RELEASE = {
    "__init__.py": '__version__ = "0.17.6"',
    "runtime/__init__.py": "",
    "runtime/config.py": """
class DeepSpeedConfig:
    def __init__(self, config):
        self._param_dict = config
""",
}
WITH_A_BLOCK = """
import memascend
from deepspeed.runtime.config import DeepSpeedConfig

offload = {"device": "nvme", "nvme_path": "/drive"}
try:
    DeepSpeedConfig({"zero_optimization": {"stage": 3, "offload_param": offload}, "memascend": {}})
except memascend.UnsupportedDeepSpeedError as error:
    print(error)
"""


def test_a_release_without_the_names_that_ours_imports_is_refused_not_an_import_error(
    tmp_path: Path,
) -> None:
    for name, source in OLD_RELEASE.items():
        file = tmp_path / "deepspeed" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    folders = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    done = subprocess.run(
        [sys.executable, "-c", WITH_A_BLOCK],
        env={**os.environ, "PYTHONPATH": folders, "MEMASCEND_DISABLE": "", "MEMASCEND_CONFIG": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.startswith("DeepSpeed 0.17.6 is older"), done.stderr
    assert len(done.stdout.splitlines()) == 3


def test_a_replacement_that_cannot_be_built_leaves_every_target_stock(
    stock: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    *rows, last = seams.SEAMS
    broken = dataclasses.replace(last, replacement=f"{__name__}:no_such_name")
    monkeypatch.setattr(seams, "SEAMS", (*rows, broken))
    with pytest.raises(AttributeError, match="no_such_name"):
        seams.arm()
    assert all(now is then for now, then in zip(targets(), stock, strict=True))
    assert not seams.is_armed()


# -- dispatchers ---------------------------------------------------------------------------------


def test_armed_seams_give_stock_parts_to_models_without_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MEMASCEND_CONFIG", raising=False)
    from memascend.deepspeed.parameters.build import wrap_param_swapper
    from memascend.deepspeed.stock.aio_handle import wrap_builder

    def stock_swapper(ds_config: Any, model_dtype: Any) -> tuple[str, Any, Any]:
        return ("stock", ds_config, model_dtype)

    for raw_config in ({}, BLOCK_OFF):
        ds_config = SimpleNamespace(_param_dict=raw_config)  # no `memascend`, the parsed block
        built = wrap_param_swapper(stock_swapper)(ds_config, "dtype")
        assert built == ("stock", ds_config, "dtype")
    assert wrap_builder(lambda *a, **k: ("stock", a, k))(1, two=2) == ("stock", (1,), {"two": 2})


def test_without_a_block_the_armed_optimizer_class_makes_a_stock_optimizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MEMASCEND_CONFIG", raising=False)
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    from memascend.deepspeed.optimizer.optimizer import ZeroOptimizer

    base = DeepSpeedZeroOptimizer_Stage3
    built: list[tuple[type, tuple[Any, ...], dict[str, Any]]] = []

    def construct(self: Any, *arguments: Any, **keywords: Any) -> None:
        built.append((type(self), arguments, keywords))

    monkeypatch.setattr(base, "__init__", construct)
    by_position = ZeroOptimizer("module", "optimizer", "names", "timers", BLOCK_OFF, clip_grad=1.0)
    assert type(by_position) is base
    by_keyword = ZeroOptimizer("module", "optimizer", "names", timers="timers", ds_config={})
    assert type(by_keyword) is base
    assert [type_ for type_, _, _ in built] == [base, base]
    assert built[0][1:] == (
        ("module", "optimizer", "names", "timers", BLOCK_OFF),
        {"clip_grad": 1.0},
    )


# -- noticing a block ----------------------------------------------------------------------------


class Watched:
    """Stands for DeepSpeedConfig."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._param_dict = config


@pytest.fixture
def config_class(monkeypatch: pytest.MonkeyPatch) -> type:
    monkeypatch.delenv("MEMASCEND_CONFIG", raising=False)
    monkeypatch.delenv("MEMASCEND_DISABLE", raising=False)
    return type("Watched", (Watched,), {"__init__": Watched.__init__})


NVME = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/drive"}}


def test_a_config_with_a_block_arms(config_class: type) -> None:
    seams.observe(SimpleNamespace(DeepSpeedConfig=config_class))  # type: ignore[arg-type]
    config_class({"zero_optimization": NVME})
    assert not seams.is_armed()
    config_class({"zero_optimization": NVME, "memascend": {}})
    assert seams.is_armed()


def test_an_active_block_stays_with_the_config(config_class: type) -> None:
    seams.observe(SimpleNamespace(DeepSpeedConfig=config_class))  # type: ignore[arg-type]
    raw = {"direct_nvme": {"queue_depth": 8}}
    made = config_class({"zero_optimization": NVME, "memascend": raw})
    assert made.memascend == parse_block(raw)
    for stock in ({}, {"memascend": {"enabled": False}}):
        assert not hasattr(config_class({"zero_optimization": NVME, **stock}), "memascend")


def test_a_block_is_parsed_once(config_class: type, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[Any] = []
    monkeypatch.setattr(block, "parse_block", lambda raw: parsed.append(raw) or parse_block(raw))
    seams.observe(SimpleNamespace(DeepSpeedConfig=config_class))  # type: ignore[arg-type]
    config_class({"zero_optimization": NVME, "memascend": {}})
    assert parsed == [{}]


def test_a_block_in_the_environment_arms(
    config_class: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    seams.observe(SimpleNamespace(DeepSpeedConfig=config_class))  # type: ignore[arg-type]
    monkeypatch.setenv("MEMASCEND_CONFIG", "{}")
    config_class({"zero_optimization": NVME})
    assert seams.is_armed()


def test_a_config_that_cannot_work_is_refused_before_anything_is_replaced(
    config_class: type,
) -> None:
    seams.observe(SimpleNamespace(DeepSpeedConfig=config_class))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="stage"):
        config_class({"zero_optimization": {"stage": 2}, "memascend": {}})
    with pytest.raises(ConfigError, match=r"memascend\.alocator"):
        config_class({"zero_optimization": NVME, "memascend": {"alocator": {}}})
    assert not seams.is_armed()


def test_observing_twice_watches_once(config_class: type) -> None:
    module: Any = SimpleNamespace(DeepSpeedConfig=config_class)
    seams.observe(module)
    watched = config_class.__init__
    seams.observe(module)
    assert config_class.__init__ is watched
    assert watched.__wrapped__ is Watched.__init__


def test_disabled_the_config_is_not_watched(
    config_class: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMASCEND_DISABLE", "1")
    seams.observe(SimpleNamespace(DeepSpeedConfig=config_class))  # type: ignore[arg-type]
    assert config_class.__init__ is Watched.__init__
