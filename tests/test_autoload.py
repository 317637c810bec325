"""Activation without a change to the script: the post-import hook, and that it breaks nothing."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memascend import autoload
from memascend.base.post_import import _ObservingLoader, _PostImportFinder
from memascend.deepspeed.seams import arm as seams

ROOT = Path(__file__).resolve().parents[1]
TARGET = "observed_package.config"


@pytest.fixture
def observed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[types.ModuleType]]:
    """A stand-in for deepspeed.runtime.config; the list holds what was observed."""
    package = tmp_path / "observed_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "config.py").write_text("VALUE = 1\n")
    found: list[types.ModuleType] = []
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(autoload, "TARGET_MODULE", TARGET)
    monkeypatch.setattr(seams, "observe", found.append)
    monkeypatch.setattr(
        sys,
        "meta_path",
        [f for f in sys.meta_path if not isinstance(f, _PostImportFinder)],
    )
    yield found
    for name in ("observed_package", TARGET):
        sys.modules.pop(name, None)


def test_entry_point_names_a_function_that_exists() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    group = text.partition('[project.entry-points."torch.backends"]')[2]
    found = re.search(r'^memascend = "([\w.]+):(\w+)"$', group, re.MULTILINE)
    assert found is not None
    target = getattr(importlib.import_module(found[1]), found[2])
    assert target is autoload.install


def test_a_later_import_is_observed_once_it_has_executed(
    observed: list[types.ModuleType],
) -> None:
    autoload.install()
    assert observed == []
    module = importlib.import_module(TARGET)
    assert observed == [module]
    assert observed[0].VALUE == 1


def test_an_earlier_import_is_observed_at_once(observed: list[types.ModuleType]) -> None:
    module = importlib.import_module(TARGET)
    autoload.install()
    assert observed == [module]


def test_other_imports_are_left_alone(observed: list[types.ModuleType]) -> None:
    autoload.install()
    package = importlib.import_module("observed_package")
    assert observed == []
    assert not isinstance(package.__loader__, _ObservingLoader)


def test_installing_again_adds_nothing(observed: list[types.ModuleType]) -> None:
    for _ in range(3):
        autoload.install()
    ours = [f for f in sys.meta_path if isinstance(f, _PostImportFinder)]
    assert len(ours) == 1
    importlib.import_module(TARGET)
    assert len(observed) == 1


def test_a_failure_of_ours_is_a_warning_and_not_a_failed_import(
    observed: list[types.ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(module: types.ModuleType) -> None:
        raise RuntimeError("no such seam")

    monkeypatch.setattr(seams, "observe", fail)
    autoload.install()
    with pytest.warns(UserWarning, match=r"memascend could not hook.*no such seam"):
        module = importlib.import_module(TARGET)
    assert module.VALUE == 1
    with pytest.warns(UserWarning, match="memascend could not hook"):
        autoload.install()


def test_a_failing_import_fails_as_it_would_without_us(
    observed: list[types.ModuleType], tmp_path: Path
) -> None:
    (tmp_path / "observed_package" / "config.py").write_text("raise KeyError('theirs')\n")
    autoload.install()
    with pytest.raises(KeyError, match="theirs"):
        importlib.import_module(TARGET)
    assert observed == []
    assert TARGET not in sys.modules


def test_a_module_that_is_missing_is_still_missing(
    observed: list[types.ModuleType], tmp_path: Path
) -> None:
    (tmp_path / "observed_package" / "config.py").unlink()
    autoload.install()
    with pytest.raises(ModuleNotFoundError, match=TARGET):
        importlib.import_module(TARGET)


def test_tools_find_the_source_of_an_observed_module(
    observed: list[types.ModuleType],
) -> None:
    autoload.install()
    module = importlib.import_module(TARGET)
    assert inspect.getsource(module) == "VALUE = 1\n"
    assert module.__loader__.get_filename(TARGET).endswith("config.py")


def test_reloading_an_observed_module_observes_it_again(
    observed: list[types.ModuleType],
) -> None:
    autoload.install()
    module = importlib.import_module(TARGET)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.reload(module)
    assert len(observed) >= 2
    assert all(found is module for found in observed)


# -- with the real DeepSpeed, in processes of their own ------------------------------------------

COMMON = """
import hashlib, inspect, json, sys

TARGETS = json.loads(sys.argv[1])

def resolve(module, attribute):
    target = __import__(module, fromlist=["x"])
    for name in attribute.split("."):
        if inspect.isclass(target) and name.startswith("__") and not name.endswith("__"):
            name = f"_{target.__name__}{name}"
        # A seam may be an addition: None is then what stands there in stock.
        target = getattr(target, name, None)
    return target

def functions(target):
    if inspect.isclass(target):
        return [f for f in vars(target).values() if inspect.isfunction(f)]
    if isinstance(target, property):
        return [target.fget]
    return [] if target is None else [target]

def picture():
    return {
        f"{module}.{attribute}": [
            [f.__module__, f.__qualname__, hashlib.sha256(f.__code__.co_code).hexdigest()]
            for f in functions(resolve(module, attribute))
        ]
        for module, attribute in TARGETS
    }

def objects():
    return [resolve(module, attribute) for module, attribute in TARGETS]

PLAIN = {"train_batch_size": 1}
ARMING = {
    "train_batch_size": 1,
    "zero_optimization": {
        "stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/not/opened/by/arming"}
    },
    "memascend": {},
}
"""

PRISTINE = """
from deepspeed.runtime.config import DeepSpeedConfig
assert "memascend" not in sys.modules
result = {"pristine": picture()}
"""

ARMED = """
import memascend
from deepspeed.runtime.config import DeepSpeedConfig
DeepSpeedConfig(PLAIN)
before = objects()
result = {"without block": picture()}
DeepSpeedConfig({**ARMING, "memascend": {"enabled": False}})
result["off"] = picture()
DeepSpeedConfig(ARMING)
from memascend.deepspeed.seams import arm as seams
result["replaced"] = [new is not old for new, old in zip(objects(), before)]
result["armed"] = seams.is_armed()
DeepSpeedConfig(PLAIN)
result["still armed"] = seams.is_armed()
seams.disarm()
result["restored"] = [new is old for new, old in zip(objects(), before)]
result["disarmed"] = seams.is_armed()
"""

DISABLED = """
import memascend
import deepspeed.runtime.config as config
construct = config.DeepSpeedConfig.__init__
result = {
    "watched": hasattr(construct, "__memascend__") or hasattr(construct, "__wrapped__"),
    "file": construct.__code__.co_filename,
}
config.DeepSpeedConfig(ARMING)
result["off"] = picture()
"""


def in_process(program: str, cwd: Path = ROOT, **environment: str) -> dict[str, Any]:
    targets = json.dumps([(seam.module, seam.attribute) for seam in seams.SEAMS])
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("MEMASCEND_")}
    done = subprocess.run(
        [sys.executable, "-c", f"{COMMON}{program}\nprint(json.dumps(result))", targets],
        cwd=cwd,
        env={"DS_ACCELERATOR": "cpu"}
        | inherited
        | {"PYTHONPATH": os.pathsep.join([str(ROOT), inherited.get("PYTHONPATH", "")])}
        | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


BLOCK = """
import warnings
# An editable installation finds the core of another clone.
sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in str(one).lower()]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import memascend
    from deepspeed.runtime.config import DeepSpeedConfig
DeepSpeedConfig(PLAIN)
result = {"warned": [text for one in caught if "memascend" in (text := str(one.message))]}
try:
    DeepSpeedConfig(ARMING)
except ImportError as error:
    result["refusal"] = str(error)
"""


def test_a_clone_without_a_core_matters_only_where_there_is_a_block(tmp_path: Path) -> None:
    """DeepSpeed's launcher is started in it; a training program would run without memascend."""
    clone = tmp_path / "memascend"
    shutil.copytree(ROOT / "memascend", clone, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    result = in_process(BLOCK, cwd=tmp_path, PYTHONPATH="")
    assert result["warned"] == []
    assert f"imported from {clone}" in result["refusal"]
    assert "pip install -e ." in result["refusal"]


@pytest.fixture(scope="module")
def pristine() -> dict[str, Any]:
    """The seams' targets where nothing of ours was ever imported."""
    result = in_process(PRISTINE, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    picture: dict[str, Any] = result["pristine"]
    return picture


@pytest.fixture(scope="module")
def states() -> dict[str, Any]:
    return in_process(ARMED)


@pytest.mark.deepspeed
def test_without_a_block_every_definition_is_stock(
    pristine: dict[str, Any], states: dict[str, Any]
) -> None:
    assert len(pristine) == len(seams.SEAMS)
    assert states["without block"] == pristine


@pytest.mark.deepspeed
def test_a_block_that_is_off_leaves_every_definition_stock(
    pristine: dict[str, Any], states: dict[str, Any]
) -> None:
    assert states["off"] == pristine


@pytest.mark.deepspeed
def test_a_block_arms_every_seam_for_the_life_of_the_process(states: dict[str, Any]) -> None:
    assert all(states["replaced"])
    assert states["armed"]
    assert states["still armed"]


@pytest.mark.deepspeed
def test_disarming_puts_back_the_very_same_objects(states: dict[str, Any]) -> None:
    assert all(states["restored"])
    assert not states["disarmed"]


@pytest.mark.deepspeed
def test_disabled_in_the_environment_not_even_the_config_is_watched(
    pristine: dict[str, Any],
) -> None:
    result = in_process(DISABLED, MEMASCEND_DISABLE="1")
    assert not result["watched"]
    assert Path(result["file"]).parts[-3:] == ("deepspeed", "runtime", "config.py")
    assert result["off"] == pristine
